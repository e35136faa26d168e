"""State other than tensors as JSON: counters, settings, random states."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

_KIND = "__kind__"


def to_json(value: Any) -> Any:
    """A value of plain types, tuples, bytes, numpy arrays and torch tensors as JSON; `from_json` gives it back."""
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, int | float):
        return value
    if isinstance(value, Mapping):
        bad = [key for key in value if not isinstance(key, str) or key == _KIND]
        if bad:
            raise TypeError(f"keys of checkpoint state must be strings other than {_KIND}, not {bad[0]!r}")
        return {key: to_json(item) for key, item in value.items()}
    if isinstance(value, list):
        return [to_json(item) for item in value]
    return _tagged(value)


def _tagged(value: Any) -> dict[str, Any]:
    if isinstance(value, tuple):
        return {_KIND: "tuple", "items": [to_json(item) for item in value]}
    if isinstance(value, bytes):
        return {_KIND: "bytes", "base64": _encode(value)}
    if isinstance(value, np.ndarray) and value.dtype.kind in "biuf":
        return {
            _KIND: "array",
            "dtype": value.dtype.str,
            "shape": list(value.shape),
            "base64": _encode(value.tobytes()),
        }
    if isinstance(value, torch.Tensor):
        raw = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        dtype = str(value.dtype).removeprefix("torch.")
        return {_KIND: "tensor", "dtype": dtype, "shape": list(value.shape), "base64": _encode(raw)}
    raise TypeError(f"cannot keep a {type(value).__name__} in the state of a checkpoint")


def from_json(value: Any) -> Any:
    """The value that `to_json` was given; tensors come back on the CPU."""
    if isinstance(value, list):
        return [from_json(item) for item in value]
    if not isinstance(value, dict):
        return value
    match value.get(_KIND):
        case None:
            return {key: from_json(item) for key, item in value.items()}
        case "tuple":
            return tuple(from_json(item) for item in value["items"])
        case "bytes":
            return base64.b64decode(value["base64"])
        case "array":
            raw = np.frombuffer(base64.b64decode(value["base64"]), dtype=np.dtype(value["dtype"]))
            return raw.reshape(value["shape"]).copy()
        case "tensor":
            return _tensor(value)
        case kind:
            raise ValueError(f"unknown kind {kind!r} in the state of a checkpoint")


def _tensor(value: dict[str, Any]) -> torch.Tensor:
    dtype = getattr(torch, value["dtype"], None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"unknown dtype {value['dtype']!r} in the state of a checkpoint")
    raw = bytearray(base64.b64decode(value["base64"]))
    if not raw:
        return torch.empty(value["shape"], dtype=dtype)
    return torch.frombuffer(raw, dtype=torch.uint8).view(dtype).reshape(value["shape"]).clone()


def _encode(raw: bytes) -> str:
    return base64.b64encode(raw).decode("ascii")
