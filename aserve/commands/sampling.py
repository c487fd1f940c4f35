"""Sampling flags of the command line as SamplingParams."""

import argparse

from aserve.request import SamplingParams


def sampling_params(arguments: argparse.Namespace) -> SamplingParams:
    """Build the parameters; raises ClientError for a value out of range."""
    return SamplingParams(
        max_tokens=arguments.max_tokens,
        temperature=arguments.temperature,
        top_p=arguments.top_p,
        top_k=arguments.top_k,
        min_p=arguments.min_p,
        seed=arguments.seed,
        stop=tuple(arguments.stop),
        ignore_eos=arguments.ignore_eos,
    )
