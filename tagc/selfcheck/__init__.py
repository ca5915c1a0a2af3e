"""Checks that an implementation of the operators gives the reference's results on this device."""

from tagc.selfcheck.calls import Call, Recorder, sketch_calls
from tagc.selfcheck.checking import KernelError, check, examine
