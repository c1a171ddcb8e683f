"""Which rows a request wants: three fields; a wrong one is answered with its name."""

from __future__ import annotations

from numbers import Integral
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sglang.srt.managers.io_struct import GenerateReqInput
    from sglang.srt.server_args import ServerArgs

WIRE_DTYPES = ("int32", "auto")


def check_request(obj: GenerateReqInput, server_args: ServerArgs) -> None:
    """Whether this server can answer with the rows that `obj` wants.

    Raises:
        ValueError: a wrong field, or a server without the flag. Names the field or the flag.
    """
    check_fields(obj)
    if asks_for_rows(obj) and not server_args.enable_return_routed_experts:
        raise ValueError(
            "return_routed_experts: this server does not capture routed experts. "
            "Start it with --enable-return-routed-experts."
        )


def check_fields(obj: GenerateReqInput) -> None:
    """Check types, values and, in a batch, lengths; before or after the request is normalized.

    Raises:
        ValueError: names the field.
    """
    num_prompts = _num_prompts(obj)
    for name, is_valid, wanted in _FIELDS:
        value = getattr(obj, name)
        if isinstance(value, list):
            if num_prompts is None:
                raise ValueError(f"{name}: a list needs a batch of prompts, one entry a prompt")
            if len(value) != num_prompts:
                raise ValueError(f"{name}: {len(value)} entries for {num_prompts} prompts")
        for entry in value if isinstance(value, list) else [value]:
            if not is_valid(entry):
                raise ValueError(f"{name} must be {wanted}, not {entry!r}")


def normalize_fields(obj: GenerateReqInput) -> None:
    """Check the fields of a request; repeat lists for `n` > 1, as is done with the prompts."""
    check_fields(obj)
    for name, _, _ in _FIELDS:
        value = getattr(obj, name)
        if isinstance(value, list):
            setattr(obj, name, value * obj.parallel_sample_num)


def fields_of(obj: GenerateReqInput, i: int) -> dict[str, Any]:
    """The three fields of request `i` of a batch, as keyword arguments."""
    values = {name: getattr(obj, name) for name, _, _ in _FIELDS}
    return {name: v[i] if isinstance(v, list) else v for name, v in values.items()}


def asks_for_rows(obj: Any) -> bool:
    """Whether a request, or any of a batch, wants rows. Embedding requests never do."""
    asked = getattr(obj, "return_routed_experts", False)
    return any(asked) if isinstance(asked, list) else asked


def _is_bool(value: Any) -> bool:
    return isinstance(value, bool)


def _is_position(value: Any) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool) and value >= 0


def _is_wire_dtype(value: Any) -> bool:
    return isinstance(value, str) and value in WIRE_DTYPES


_FIELDS = (
    ("return_routed_experts", _is_bool, "true or false"),
    ("routed_experts_start_len", _is_position, "an integer, 0 or more"),
    ("routed_experts_dtype", _is_wire_dtype, 'one of "int32" and "auto"'),
)


def _num_prompts(obj: GenerateReqInput) -> int | None:
    """Number of prompts of a batch, or None for a single request."""
    if obj.text is not None:
        return len(obj.text) if isinstance(obj.text, list) else None
    if obj.input_ids is not None:
        return len(obj.input_ids) if _starts_with_list(obj.input_ids) else None
    if obj.input_embeds is not None:
        embeds = obj.input_embeds
        is_batch = isinstance(embeds, list) and len(embeds) > 0 and _starts_with_list(embeds[0])
        return len(embeds) if is_batch else None
    return None


def _starts_with_list(values: Any) -> bool:
    return isinstance(values, list) and len(values) > 0 and isinstance(values[0], list)
