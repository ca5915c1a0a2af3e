"""The codecs and feedback kinds that a policy can ask for, as its YAML spells them."""

from typing import Annotated, ClassVar, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator


class Strict(BaseModel):
    """A part of a policy: immutable, and without keys that it does not know."""

    # Strict, so that `true` is no 1 and "0.2" no number.
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


_Density = Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)]
_Steps = Annotated[int, Field(ge=0, le=2**31 - 1)]
_Block = Literal[32, 64, 128, 256, 512, 1024, 2048, 4096]


class SketchCodec(Strict):
    """Kept elements, quantized and summed in a count sketch.

    `density` is the fraction of elements that a rank keeps, in (0, 1]. `symbol` is the group size
    and quantization of one 32-bit symbol; `auto` picks by the number of ranks. With the
    `support` `own` every rank keeps its largest groups, and the sketch has room for the union of
    them; with `shared` all ranks keep the groups that the shard's owner chose one step ahead. The
    first `warmup_steps` reductions go dense: gradients change fastest at the start of a training.
    (A unit waits for the longest warm-up of its rules.)
    """

    compresses: ClassVar[bool] = True

    kind: Literal["sketch"] = "sketch"
    density: _Density
    symbol: Literal["auto", "int8x4", "int16x2", "int32x1", "float32"] = "auto"
    support: Literal["own", "shared"] = "own"
    warmup_steps: _Steps = 0


class PackedCodec(Strict):
    """Kept elements with their index, one message to each owner, who adds them up in float32.

    `density` and `warmup_steps` as for the sketch. Elements are kept in groups of `group`, and
    quantized to `bits` in blocks of `block` kept elements that share a scale. `support` is as for
    the sketch: a rank's `own`, or `shared`.
    """

    compresses: ClassVar[bool] = True

    kind: Literal["packed"] = "packed"
    density: _Density
    bits: Literal[4, 8, 16] = 8
    group: Literal[1, 2, 4, 8, 16, 32] = 1
    block: _Block = 256
    support: Literal["own", "shared"] = "own"
    warmup_steps: _Steps = 0


class QuantizedCodec(Strict):
    """Every element in `bits`, with a scale for every `block` elements; summed in float32."""

    compresses: ClassVar[bool] = True

    kind: Literal["quantized"] = "quantized"
    bits: Literal[2, 4, 8] = 4
    block: _Block = 256


class MatrixCodec(Strict):
    """Every element of a matrix in `bits`, with a scale for each row and each column.

    The scales follow the gradient of the step, which is a sum of outer products; what is left
    after dividing by them is closer to Gaussian, and a few bits go a long way. With a `group`, so
    many neighbours in a row share one code, which says which of them is the largest, and its sign:
    0.5, 0.33 and 0.2 bits per element for 8, 16 and 32. `level` multiplies the values that codes
    stand for: above 1, a message carries more of what is owed, and more noise. The `warmup_steps`
    are as for the sketch.
    """

    compresses: ClassVar[bool] = True

    kind: Literal["matrix"] = "matrix"
    bits: Literal[1, 2, 4] = 1
    group: Literal[1, 8, 16, 32] = 1
    level: Annotated[float, Field(ge=0.5, le=2, allow_inf_nan=False)] = 1
    warmup_steps: _Steps = 0

    @model_validator(mode="after")
    def _check_group(self) -> Self:
        if self.group > 1 and self.bits > 1:
            raise ValueError(
                f"bits {self.bits}: a group of {self.group} shares a code, with bits 1"
            )
        return self


class DenseCodec(Strict):
    """The gradient as it is, through the ordinary reduce-scatter.

    With the `wire` `bfloat16` it travels rounded to 16 bits, and is summed in float32.
    """

    kind: Literal["dense"] = "dense"
    wire: Literal["native", "bfloat16"] = "native"

    @property
    def compresses(self) -> bool:
        """Whether anything but the ordinary collective is needed."""
        return self.wire != "native"


class AutoCodec(Strict):
    """The fastest of dense, bfloat16, 8 and 4 bits on the link that `tagc.wrap` measures.

    `min_bits` bounds the choice from below. None of them costs visible quality: 4 bits go with
    the rule's feedback, by default `average` (LoCo). Parameters, which have no feedback, get 8
    bits at least.
    """

    compresses: ClassVar[bool] = True

    kind: Literal["auto"] = "auto"
    min_bits: Literal[4, 8, 16, 32] = 4


# Another codec is a class with a `kind` of its own and a place in this union.
GradientCodec = SketchCodec | PackedCodec | QuantizedCodec | MatrixCodec | DenseCodec | AutoCodec
Codec = Annotated[GradientCodec, Field(discriminator="kind")]


class QuantizedParameters(Strict):
    """Parameters in `bits`, with a scale for every `block` elements, in FSDP's all-gather.

    With `keep_for_backward` a rank keeps the messages that it received in forward, the unit's
    other parameters in them too, and gathers nothing in backward. (It matters where FSDP reshards
    after forward, and so gathers twice.)
    """

    compresses: ClassVar[bool] = True

    kind: Literal["quantized"] = "quantized"
    bits: Literal[4, 8] = 8
    block: _Block = 256
    keep_for_backward: bool = False


ParameterCodec = QuantizedParameters | DenseCodec | AutoCodec

# The first kind is what a codec gets without a word.
FEEDBACK_KINDS = {
    "dense": ("none",),
    "sketch": ("residual", "momentum", "none"),
    "packed": ("residual", "momentum", "none"),
    "matrix": ("residual", "average", "momentum", "none"),
    "quantized": ("average", "residual", "momentum", "none"),
    "auto": ("average", "residual", "none"),
}


class Feedback(Strict):
    """What becomes of the part of a gradient that a codec did not send.

    `residual` keeps it per rank in `dtype` (`int8` has a scale for every 256 elements) and adds it
    to the next gradient; `average` (LoCo)
    keeps a moving average of it instead, `beta` of the old and `1 - beta` of the new, and starts
    from zero every `reset_steps`; `none` drops it. `momentum` sends a moving average of the
    gradient instead, `1 - rate` of the old and `rate` of the new: the residual is what has not
    been sent of it, and the shard's owner hands out the rest, so that the optimizer needs no
    first momentum of its own.

    A codec that sends the share `lead` of what is owed delivers a gradient late, by
    `(1 - lead) / lead` steps on average, and lateness costs more than noise. With a `lead` below 1
    the owner undoes it: it hands out `(sent - (1 - lead) * sent before) / lead`.
    """

    kind: Literal["none", "residual", "average", "momentum"] = "residual"
    dtype: Literal["float32", "bfloat16", "int8"] = "float32"
    beta: Annotated[float, Field(gt=0, lt=1, allow_inf_nan=False)] = 0.8
    reset_steps: Annotated[int, Field(ge=1, le=2**31 - 1)] = 1024
    rate: Annotated[float, Field(gt=0, lt=1, allow_inf_nan=False)] = 0.1
    lead: Annotated[float, Field(ge=0.05, le=1, allow_inf_nan=False)] = 1

    @model_validator(mode="after")
    def _check_unused(self) -> Self:
        if self.kind == "none" and self.dtype != "float32":
            raise ValueError(f"dtype {self.dtype!r} has no effect: kind 'none' stores nothing")
        for kind, keys in {
            "average": {"beta", "reset_steps"},
            "momentum": {"rate"},
            "residual": {"lead"},
        }.items():
            unused = sorted(self.model_fields_set & keys)
            if self.kind != kind and unused:
                raise ValueError(f"{' and '.join(unused)}: only the kind {kind!r} has them")
        return self
