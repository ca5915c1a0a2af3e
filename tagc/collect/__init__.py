"""The core: compressed collectives of one unit, over transports, and what ranks must agree on."""

from tagc.collect.agree import agree_on, gather_by_rank, gather_merged
from tagc.collect.copy_gatherer import CopyGatherer
from tagc.collect.gatherer import GatherSetup, MessageGatherer, Phase, UnitGatherer
from tagc.collect.gauge import NoiseGauge, noise_factor
from tagc.collect.hosts import HostGroups, Hosts, RankOnHost, check_hosts
from tagc.collect.lockstep import DesyncError, Lockstep
from tagc.collect.meeting import Meeting
from tagc.collect.reducer import UnitReducer
from tagc.collect.rehearsal import rehearse
from tagc.collect.replicas import ReplicaAverage
from tagc.collect.transport import (
    BareTransport,
    CollectiveWork,
    SilentGroup,
    Transport,
    check_backends,
    timeout_of,
)
