"""The `tagc` command."""

import argparse
import importlib
import sys
from collections.abc import Sequence

from tagc.costs.cli import add_commands
from tagc.costs.shapes import ModelError
from tagc.policy import Policy, PolicyError, policies

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one subcommand and gives the exit status: 0, or 2 for invalid input."""
    args = _parser().parse_args(argv)
    try:
        return args.run(args)
    except (PolicyError, ModelError) as error:
        print(error, file=sys.stderr)
        return 2


def _policies(args: argparse.Namespace) -> int:
    listed = policies()
    width = max(map(len, listed))
    for name, about in listed.items():
        print(f"{name:{width}}  {about}")
    return 0


def _validate(args: argparse.Namespace) -> int:
    policy = Policy.load(args.file)
    count = len(policy.gradients)
    print(f"ok {policy.name}: {count} rule{'' if count == 1 else 's'}")
    return 0


def _bench(args: argparse.Namespace) -> int:
    # Only here: the benchmarks import much that the other commands do without.
    benchmarks = importlib.import_module("tagc.benchmarks.suites").main
    argv = ["kernels", "--quick"]
    for option in ("device", "json", "plots"):
        value = getattr(args, option)
        argv += [] if value is None else [f"--{option}", value]
    return benchmarks(argv)


def _doctor(args: argparse.Namespace) -> int:
    # Torch, and what it loads, only for those who ask for it.
    torch = importlib.import_module("torch")
    selfcheck = importlib.import_module("tagc.selfcheck")
    if args.device == "cuda" and not torch.cuda.is_available():
        print("no CUDA device here", file=sys.stderr)
        return 2
    kind = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    device = torch.device(kind, torch.cuda.current_device() if kind == "cuda" else None)
    wrong = bool(selfcheck.examine(device, args.ops, every=args.all).failures)
    if not args.no_timing:
        benchmarks = importlib.import_module("tagc.benchmarks.suites").main
        wrong |= bool(benchmarks(["kernels", "--quick", "--device", kind]))
    print("If anything here is wrong, all of it belongs into the report.")
    return int(wrong)


def _parser() -> argparse.ArgumentParser:
    # Each subcommand sets `run`: a function of the parsed arguments that gives the exit status.
    parser = argparse.ArgumentParser(
        prog="tagc", description="Compressed gradient reduce-scatter for sharded training."
    )
    commands = parser.add_subparsers(metavar="COMMAND", required=True)

    command = commands.add_parser("policies", help="list the built-in policies")
    command.set_defaults(run=_policies)

    command = commands.add_parser("validate", help="check a policy file")
    command.add_argument("file", metavar="FILE", help="a YAML file, or the name of a built-in")
    command.set_defaults(run=_validate)

    command = commands.add_parser(
        "bench", help="measure the kernels on this machine beside baselines, in about a minute"
    )
    command.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda if there is one")
    command.add_argument("--json", metavar="FILE", help="append the results, a JSON object a line")
    command.add_argument("--plots", metavar="DIR", help="draw them (needs tagc[demo])")
    command.set_defaults(run=_bench)

    command = commands.add_parser(
        "doctor",
        help="check the operators on this machine against the reference, to the bit, and time them "
        "beside a copy; what it prints belongs into a report of a bug",
    )
    command.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda if there is one")
    command.add_argument("--ops", help="implementation: reference, cpu or triton; default: auto")
    command.add_argument(
        "--all", action="store_true", help="all kinds of calls on a CPU, too: minutes of compiling"
    )
    command.add_argument("--no-timing", action="store_true", help="only check")
    command.set_defaults(run=_doctor)

    add_commands(commands)
    return parser


if __name__ == "__main__":
    sys.exit(main())
