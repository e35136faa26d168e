"""The block of all arguments at the start of a log."""

from __future__ import annotations

from megatron_overlap.config.schema import GROUPS, Config

_VALUE_COLUMN = 48


def format_arguments(config: Config) -> str:
    """Return Megatron's block of arguments: one line each, sorted by name, values in one column."""
    groups = config.to_dict()
    flat = {name: value for group in (*GROUPS, "extra", "derived") for name, value in groups[group].items()}
    lines = [f"  {name} {'.' * (_VALUE_COLUMN - len(name))} {value}" for name, value in flat.items()]
    return "\n".join(
        [
            "------------------------ arguments ------------------------",
            *sorted(lines, key=str.lower),
            "-------------------- end of arguments ---------------------",
        ]
    )
