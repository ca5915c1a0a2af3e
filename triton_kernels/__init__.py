"""Triton kernels of tagc's operators; :mod:`tagc.triton_kernels.ops` has all operators.

A file is a description, kernels, and their launchers in the order of launches. Importing this
package does not import Triton, which may not be installed; importing ``ops`` does.
"""
