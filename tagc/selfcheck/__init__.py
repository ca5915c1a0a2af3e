"""Checks that an implementation of the operators gives the reference's results on this device."""

from tagc.selfcheck.calls import Call, Recorder
from tagc.selfcheck.checking import Checked, KernelError, check
from tagc.selfcheck.doctor import examine
from tagc.selfcheck.everything import every_call, sketch_calls
from tagc.selfcheck.platform import about
