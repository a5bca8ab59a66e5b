"""The dtype codes of safetensors headers, which streamload uses everywhere. No torch here."""

from __future__ import annotations

#: Code -> bits of one element. The codes are those of the safetensors format (safetensors 0.8, ``Dtype``); C128, which
#: it lacks, is for files of torch.save.
BITS: dict[str, int] = {
    "F4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
    "BOOL": 8,
    "U8": 8,
    "I8": 8,
    "F8_E4M3": 8,
    "F8_E5M2": 8,
    "F8_E8M0": 8,
    "F8_E4M3FNUZ": 8,
    "F8_E5M2FNUZ": 8,
    "I16": 16,
    "U16": 16,
    "F16": 16,
    "BF16": 16,
    "I32": 32,
    "U32": 32,
    "F32": 32,
    "I64": 64,
    "U64": 64,
    "F64": 64,
    "C64": 64,
    "C128": 128,
}

#: torch's name -> code. F4 packs two elements into one of torch's.
FROM_TORCH: dict[str, str] = {
    "bool": "BOOL",
    "uint8": "U8",
    "int8": "I8",
    "int16": "I16",
    "uint16": "U16",
    "int32": "I32",
    "uint32": "U32",
    "int64": "I64",
    "uint64": "U64",
    "float16": "F16",
    "bfloat16": "BF16",
    "float32": "F32",
    "float64": "F64",
    "complex64": "C64",
    "complex128": "C128",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "float8_e8m0fnu": "F8_E8M0",
    "float8_e4m3fnuz": "F8_E4M3FNUZ",
    "float8_e5m2fnuz": "F8_E5M2FNUZ",
    "float4_e2m1fn_x2": "F4",
}

#: Only these convert into one another: (bits of the exponent, bits of the fraction).
FLOATS: dict[str, tuple[int, int]] = {"F16": (5, 10), "BF16": (8, 7), "F32": (8, 23), "F64": (11, 52)}


def castable(source: str, target: str) -> bool:
    """Whether a tensor of dtype ``source`` may be converted into ``target`` without being asked to."""
    return source in FLOATS and target in FLOATS


def narrows(source: str, target: str) -> bool:
    """Whether converting the float dtype ``source`` into ``target`` can lose range or precision."""
    return any(old > new for old, new in zip(FLOATS[source], FLOATS[target], strict=True))
