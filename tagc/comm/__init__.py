"""One unit's collectives: what stands in for FSDP's, the exchanges it goes by, and what ranks must
agree on."""

from tagc.comm.agreement import agree_on, gather_by_rank, gather_merged
from tagc.comm.copy_gatherer import CopyGatherer
from tagc.comm.gatherer import GatherSetup, Phase, UnitGatherer
from tagc.comm.gauge import NoiseGauge, noise_factor
from tagc.comm.host_copy import HostCopy
from tagc.comm.hosts import HostGroups, Hosts, RankOnHost, check_hosts
from tagc.comm.lockstep import Lockstep
from tagc.comm.meeting import Meeting
from tagc.comm.message_gatherer import MessageGatherer
from tagc.comm.reducer import UnitReducer
from tagc.comm.rehearsal import rehearse
from tagc.comm.replicas import ReplicaAverage
from tagc.comm.skipped_step import copy_step_state, restore_step_state
from tagc.comm.transport import CollectiveWork, Transport, check_backends

__all__ = [
    "CollectiveWork",
    "CopyGatherer",
    "GatherSetup",
    "HostCopy",
    "HostGroups",
    "Hosts",
    "Lockstep",
    "Meeting",
    "MessageGatherer",
    "NoiseGauge",
    "Phase",
    "RankOnHost",
    "ReplicaAverage",
    "Transport",
    "UnitGatherer",
    "UnitReducer",
    "agree_on",
    "check_backends",
    "check_hosts",
    "copy_step_state",
    "gather_by_rank",
    "gather_merged",
    "noise_factor",
    "rehearse",
    "restore_step_state",
]
