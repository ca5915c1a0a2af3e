"""The ``tagc`` command: its arguments and their help. Running a subcommand imports
:mod:`tagc.commands.commands`, so ``tagc --help`` needs no torch."""

from __future__ import annotations

import argparse
import importlib
import io
import math
import sys
from collections.abc import Sequence
from typing import Any

from tagc.basics.quantities import bandwidth, count, memory, number, ranks, seconds, share
from tagc.basics.version import __version__

__all__ = ["main"]

_DTYPES = ("fp32", "bf16")
_MODEL = (
    "a number of parameters (7e9, 7B) for a synthetic transformer; a config.json of transformers; "
    "a safetensors file, an index of several, or their folder (only headers are read); "
    "module:function, which tagc calls on the meta device and which returns an nn.Module or a "
    "state dict; or a JSON file of shapes by name"
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand and return its exit status: 0, or 2 for invalid input."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # names of files may not be valid text
            stream.reconfigure(errors="backslashreplace")
    args = _parser().parse_args(argv)
    args.given = {k for k, v in vars(args).items() if v != args.parser.get_default(k)}
    return importlib.import_module("tagc.commands.commands").run(args)


class _Command:
    """A subcommand, to which arguments can be added."""

    def __init__(self, commands: Any, name: str, about: str, *examples: str) -> None:
        lines = [f"  tagc {name} {example}".rstrip() for example in examples]
        self.parser: argparse.ArgumentParser = commands.add_parser(
            name,
            help=about,
            description=f"{about[:1].upper()}{about[1:]}.",
            epilog="\n".join(["examples:", *lines]),
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        self.parser.set_defaults(parser=self.parser)

    def add(self, *names: str, **options: Any) -> None:
        """Add an argument; its help states the default."""
        if options.get("default") not in (None, [], math.inf):
            options["help"] += " (default: %(default)s)"
        self.parser.add_argument(*names, **options)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="tagc", description="Compressed collectives for sharded training with torch's FSDP."
    )
    parser.add_argument("--version", action="version", version=f"tagc {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", dest="command", required=True)

    command = _Command(commands, "policies", "list the built-in policies", "", "--json")
    _add_json(command)

    command = _Command(commands, "validate", "check a policy file", "mine.yaml", "hybrid")
    command.add("file", metavar="FILE", help="a YAML file, or the name of a built-in")

    command = _Command(
        commands, "show", "print a policy and the rules it extends", "hybrid", "mine.yaml"
    )
    command.add("file", metavar="FILE", help="a YAML file, or the name of a built-in")

    _Command(commands, "schema", "print the JSON Schema of policy files, for editors", "")

    _add_explain(commands)
    _add_advise(commands)

    command = _Command(
        commands,
        "bench",
        "time the kernels on this machine beside baselines, in about a minute",
        "",
        "--device cpu --json results.jsonl",
    )
    command.add("--device", choices=("cpu", "cuda"), help="default: cuda if there is one")
    command.add("--json", metavar="FILE", help="append the results, one JSON object per line")
    command.add("--plots", metavar="DIR", help="write plots (needs tagc[demo])")

    command = _Command(
        commands,
        "doctor",
        "compare the operators on this machine with the reference, and time them beside a copy",
        "",
        "--device cuda --no-timing",
    )
    command.add("--device", choices=("cpu", "cuda"), help="default: cuda if there is one")
    command.add("--no-timing", action="store_true", help="compare only, without timing")
    return parser


def _add_explain(commands: Any) -> None:
    command = _Command(
        commands,
        "explain",
        "show what a policy does to a model",
        "7B --world 64 --ranks-per-host 8 --policy hosts",
        "llama-70b/config.json --world 256 --ranks-per-host 8",
        "model.safetensors.index.json --world 64 --json",
        "my_models:make --world 16",
        "7B --world 64 --policy auto --bandwidth 100Gbit",
        "1B --world 8 --policy loco-4bit --ddp",
        "70B --mesh pp=2,dp=4,tp=8 --tokens 8192 --policy hybrid-3d",
    )
    command.add("model", metavar="MODEL", help=_MODEL)
    command.add("--params", help=argparse.SUPPRESS)  # advise's option: an error shows what to write
    command.add("--policy", default="hybrid", help="a built-in name or a YAML file")
    _add_shared(command)
    command.add("--bandwidth", type=bandwidth, help="link bandwidth for codec auto, such as 10Gbit")
    command.add("--latency", type=seconds, default=0.0, help="link latency for codec auto")
    command.add("--sites", type=ranks, default=1, help="with a policy for sites: their number")


def _add_advise(commands: Any) -> None:
    command = _Command(
        commands,
        "advise",
        "predict whether compression pays",
        "--params 70B --world 64 --ranks-per-host 8 --bandwidth 100Gbit --device-memory 80GB",
        "--model my_models:make --world 8 --bandwidth 10Gbit --step-time 1.2s",
        "--model llama-70b/config.json --world 256 --bandwidth 10Gbit --plot step-time.png",
        "--params 70B --mesh pp=2,dp=4,tp=8 --tokens 8192 --ranks-per-host 8 --bandwidth 100Gbit",
        "--params 1B --world 8 --ddp --bandwidth 1Gbit --step-time 1s",
        "--params 1B --sites 4 --bandwidth 200Mbit --latency 50ms --step-time 1s",
    )
    what = command.parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--params", help="parameters of a synthetic transformer, such as 7e9")
    what.add_argument("--model", help=_MODEL)
    _add_shared(command)
    command.add(
        "--sites",
        type=ranks,
        default=1,
        help="sites that exchange changes of parameters, beside gradients in every step; "
        "--bandwidth is that of a site, --world without it one rank in each",
    )
    command.add(
        "--bandwidth",
        type=bandwidth,
        required=True,
        help="bandwidth of the link from one host to the others, such as 10Gbit or 1.25GB",
    )
    command.add(
        "--latency", type=seconds, default=0.0, help="latency of one collective, such as 50us"
    )
    command.add(
        "--inside-bandwidth",
        type=bandwidth,
        default=math.inf,
        help="bandwidth between a rank and others on its host, such as 450GB; default: not counted",
    )
    command.add(
        "--shard-bandwidth", type=bandwidth, help="bandwidth within a replica, if it is faster"
    )
    command.add("--step-time", type=seconds, help="compute time of a step, without communication")
    command.add(
        "--overlap",
        type=share,
        help="share of the communication that compute can hide; default: 0 on cpu, else 1",
    )
    command.add(
        "--device",
        choices=("cpu", "gpu"),
        default="gpu",
        help="cpu: gloo, with codecs timed on this machine; gpu: NCCL",
    )
    command.add(
        "--memory-bandwidth",
        type=bandwidth,
        help="memory bandwidth of the device, such as 3TB; gives a lower bound of codec time",
    )
    command.add(
        "--device-memory",
        type=memory,
        help="memory of a rank without activations, such as 80GB; marks policies that do not fit",
    )
    command.add(
        "--policy",
        nargs="+",
        default=[],
        metavar="FILE",
        help="more policies to compare; the first with dimensions is advised for activations",
    )
    command.add(
        "--plot",
        metavar="FILE",
        help="plot step time against bandwidth (needs tagc[demo]); PNG, SVG or PDF",
    )


def _add_json(command: _Command) -> None:
    command.add("--json", action="store_true", help="print JSON, in bytes and seconds")


def _add_shared(command: _Command) -> None:
    """What explain and advise both know."""
    command.add("--world", type=ranks, help="total number of ranks; required without --mesh")
    command.add("--replicas", type=ranks, default=1, help="replicas of the sharded model")
    command.add(
        "--ddp", action="store_true", help="the model is in DDP: each rank has the whole model"
    )
    command.add("--ranks-per-host", type=ranks, default=1, help="ranks per host and network card")
    command.add(
        "--dtype", choices=_DTYPES, default="fp32", help="dtype of the gradients that are reduced"
    )
    command.add(
        "--param-dtype",
        choices=_DTYPES,
        help="dtype of the parameters that FSDP gathers (default: bf16)",
    )
    command.add(
        "--mesh",
        help="ranks by dimension instead of --world, such as pp=2,dp=4,tp=8; neighbours differ in "
        "the last one",
    )
    command.add("--tokens", type=count, help="tokens of a data-parallel rank in a step, for --mesh")
    command.add("--experts-per-token", type=ranks, default=1, help="with a dimension ep")
    command.add("--micro-batches", type=ranks, default=1, help="backwards per optimizer step")
    command.add(
        "--learning-rate",
        type=number,
        help="AdamW's, such as 3e-4, on which the bytes of codec exact depend",
    )
    _add_json(command)


if __name__ == "__main__":
    sys.exit(main())
