"""An emulator of compiled kernels: runs their PTX on CPU tensors, and names what it must not do.

``parse`` reads PTX, ``threads`` holds the registers of many programs side by side, the files
``integers``, ``floats``, ``conversions``, ``memory_access``, ``atomics`` and ``warps`` say what
instructions do, ``control`` follows branches and barriers, ``memory`` and ``races`` watch every
access, and ``launch`` puts it all in the place of Triton's driver.

A launch fails, at the kernel's line, on an access outside of the tensors or not aligned to its
width, on a read of shared memory that nobody wrote, on a race between programs or, without a
barrier, between threads, and on a barrier that not all threads of a program reach. Registers and
shared memory hold garbage until they are written; programs come in random order.
"""
