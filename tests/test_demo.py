"""The table that `make demo` prints."""

from examples.report import Run, table

PLAIN = Run(
    name="plain FSDP2",
    train_losses=[2.0],
    validation_losses={1: 2.0},
    wire_bytes=[5_000_000],
    step_seconds=0.1,
    gradient_bytes_per_step=2e6,
    parameter_bytes_per_step=3e6,
    dense_gradient_bytes_per_step=2e6,
    dense_parameter_bytes_per_step=3e6,
)
COMPRESSED = Run(
    **vars(PLAIN)
    | {
        "name": "small",
        "validation_losses": {1: 2.02},
        "gradient_bytes_per_step": 0.5e6,
        "parameter_bytes_per_step": 0.5e6,
        "unresolved": 0,
    }
)
FIRST = ["run", "val. loss", "gap", "sent/step", "ratio"]


def cells(link: str | None) -> list[list[str]]:
    rows = table([PLAIN, COMPRESSED], link).splitlines()
    return [[cell.strip() for cell in row.split("|")[1:-1]] for row in (rows[0], *rows[2:])]


def test_times_on_links_follow_from_the_bytes() -> None:
    # A megabyte takes 8 ms on 1 Gbit/s.
    assert cells(None) == [
        [*FIRST, "step here", "on 1 Gbit/s", "on 100 Mbit/s"],
        ["plain FSDP2", "2.0000", "-", "5.00 MB", "1.00×", "100 ms", "140 ms", "500 ms"],
        ["the same, bf16", "", "", "2.50 MB", "2.00×", "", "120 ms", "300 ms"],
        ["small", "2.0200", "+1.00%", "1.00 MB", "5.00×", "100 ms", "108 ms", "180 ms"],
    ]
