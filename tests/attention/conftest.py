"""Which tests of attention share a process when several run them."""

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Keep flash-attn-4's together: it compiles for seconds what it meets first, anew in each process."""
    for item in items:
        parameters = item.callspec.params if isinstance(item, pytest.Function) and hasattr(item, "callspec") else {}
        if "fa" in str(parameters.get("setting", "")).split(","):
            item.add_marker(pytest.mark.xdist_group("fa"))
