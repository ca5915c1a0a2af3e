"""The combinations: API, option, dtype, ranks and policy."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby

from .apis import APIS
from .option import DTYPES, POLICIES


@dataclass(frozen=True, kw_only=True)
class Case:
    api: str
    dtype: str
    ranks: int
    option: str
    policy: str

    def __str__(self) -> str:
        return f"{self.api}-{self.option}-{self.dtype}-{self.ranks} ranks-{self.policy}"

    @property
    def group(self) -> tuple[str, int, str, str]:
        """Cases with the same native model."""
        return self.api, self.ranks, self.option, self.dtype

    @property
    def refused(self) -> str:
        """Words of the error that is expected, if one is."""
        option, dtype = APIS[self.api].options[self.option], DTYPES[self.dtype]
        if self.policy == "dense":
            return option.refused_dense
        if self.policy == "changes" and dtype.refused_changes:
            return dtype.refused_changes
        return dtype.refused or option.refused or APIS[self.api].refuses.get(self.policy, "")


def cases() -> list[Case]:
    """The matrix: every option in fp32, and every dtype, with every policy, on ranks in turn; the
    plain option on every number of ranks."""
    rows: dict[tuple[str, str, int, str], None] = {}
    for name, api in APIS.items():
        for i, (option, spec) in enumerate(api.options.items()):
            ranks = (4,) if api.replicas > 1 else spec.ranks
            rows[name, "fp32", ranks[i % len(ranks)], option] = None
        for i, dtype in enumerate(api.dtypes):
            rows[name, dtype, api.ranks[i % len(api.ranks)], "plain"] = None
        for ranks in api.ranks:
            rows[name, "fp32", ranks, "plain"] = None
    found = [
        Case(api=api, dtype=dtype, ranks=ranks, option=option, policy=policy)
        for api, dtype, ranks, option in rows
        for policy in POLICIES
        if policy not in APIS[api].refuses or (dtype, option) == ("fp32", "plain")
    ]
    return sorted(found, key=lambda case: (list(APIS).index(case.api), case.ranks))


def quick_cases() -> list[Case]:
    """Of a row in ten, but for the slow ones, a case: in turn `dense`, and the others in turn.

    What is dense goes the same way for all APIs and ranks: most have it with the plain option only.
    Hosts and replicas, on four ranks each, have every other row.
    """
    found: list[Case] = []
    turn = 0
    for (api, ranks, option, dtype), row in groupby(cases(), key=lambda c: c.group):
        if (
            ranks > 4  # a larger pool of processes
            or option == "compiled blocks"
            or (api != "FSDP2" and dtype not in ("fp32", "bf16"))
        ):
            continue
        some = list(row)
        others = [case for case in some if case.policy != "dense"]
        turn += 1
        if turn % 2 == 0 and others:
            wanted = turn % 4 or api not in ("FSDP2, hosts", "FSDP2, replicas")
            chosen = others[(turn // 2 - 1) % len(others)]
        else:
            wanted = api == "FSDP2" and ranks < 4
            chosen = some[0]
        if wanted or option == "plain":
            found.append(chosen)
    return [case for i, case in enumerate(found) if i % 10 == 4]
