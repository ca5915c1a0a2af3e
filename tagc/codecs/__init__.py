"""Codecs: how the segments of a unit travel."""
