"""What shipped policies did to the loss, beside the time that ``tagc advise`` predicts."""

from __future__ import annotations

UNTUNED: dict[str, float] = {
    "attn-only": 0.007,
    "auto": 0.001,
    "half-bit": 0.209,
    "hosts": -0.001,
    "hybrid": 0.001,
    "loco-4bit": -0.002,
    "one-bit": 0.004,
    "thrifty": 0.006,
    "two-bit": 0.0,
}
"""Change of the validation loss at the learning rate and clipping threshold of the uncompressed
run: nanoGPT's model of 0.8 M parameters, 150 steps, one seed (seeds differ by 0.2%), a table of
docs/quality.md. Policies that are not listed were not measured there."""

WITH_DDP: dict[str, float] = {"loco-4bit": 0.0069, "one-bit": 0.0424}
"""The same with DDP, at the uncompressed run's best rate with ``keep_rates``: a GPT of 0.14 M
parameters, 600 steps, three seeds; ± 0.63% and ± 5.4%."""


def about_loss(*, ddp: bool) -> str:
    """What the figures are, as a note."""
    if ddp:
        how = "with keep_rates, in 600 steps of a GPT of 0.14 M parameters, three seeds"
    else:
        how = "in 150 steps of a GPT of 0.8 M parameters, one seed (seeds differ by 0.2%)"
    return (
        f"- loss: its change at the learning rate of the uncompressed run, {how}; docs/quality.md"
    )


def loss_of(name: str, *, ddp: bool) -> float | None:
    """The change of the loss; None if it was not measured."""
    return (WITH_DDP if ddp else UNTUNED).get(name)


def loss_text(name: str, *, ddp: bool) -> str:
    """The change as text: ``+0.4%``, or ``not measured``."""
    loss = loss_of(name, ddp=ddp)
    return "not measured" if loss is None else f"{loss:+.1%}"


def rate_text(factor: float | None) -> str:
    """What a policy asks of the learning rate; None if it does not say."""
    if factor is None:
        return "not measured"
    return "yours" if factor == 1 else f"{factor:g}× yours, or keep_rates"
