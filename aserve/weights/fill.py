"""The loop that moves a checkpoint into a model: every slot is written exactly once, or loading fails."""

from aserve.errors import WeightsError
from aserve.layers.weighted import WeightSlot
from aserve.models.decoder import Decoder
from aserve.weights.checkpoint import Checkpoint, StoredTensor

DERIVED_SUFFIXES = (".rotary_emb.inv_freq",)  # old checkpoints keep what is computed from the config anyway


def fill(model: Decoder, checkpoint: Checkpoint) -> None:
    """Write each tensor of ``checkpoint`` to its slot, one in memory at a time.

    Raises WeightsError naming tensor and file for a tensor that is missing, unknown, repeated or misshapen.
    """
    slots = model.slots()
    unwritten = dict(slots)
    for stored in checkpoint.tensors():
        if stored.name.endswith(DERIVED_SUFFIXES) or (stored.name == "lm_head.weight" and model.config.is_head_tied):
            continue
        if stored.name not in slots:
            raise WeightsError(
                f"tensor {stored.label} in {stored.file} belongs to no parameter of this {model.config.architecture}"
            )
        if any(unwritten.pop(name, None) is None for name in (stored.name, *slots[stored.name].covers)):
            raise WeightsError(f"tensor {stored.label} in {stored.file} occurs twice in the checkpoint")
        _write(stored, slots[stored.name])
    missing = [name for name, slot in unwritten.items() if not slot.is_optional]
    if missing:
        more = f" and {len(missing) - 1} more tensors" if len(missing) > 1 else ""
        raise WeightsError(f"tensor {missing[0]}{more} missing from {checkpoint.path}")


def _write(stored: StoredTensor, slot: WeightSlot) -> None:
    if stored.shape not in (slot.shape, *slot.other_shapes):
        raise WeightsError(
            f"tensor {stored.label} in {stored.file} has the shape {list(stored.shape)}, "
            f"but the config asks for {list(slot.shape)}"
        )
    slot.write(stored.read())
