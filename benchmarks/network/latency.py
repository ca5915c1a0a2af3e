"""A switch that holds back every frame for a while, for links with latency.

    python -m benchmarks.network.latency 0.05 p0 p1 p2

Not every kernel has netem, so a process does it. It reads the frames of each interface (``p0``,
...) from a packet socket and writes them to another one's when they are due. Large packets of the
segmentation offload stay whole, so a fast link takes few frames. It runs until it is killed.
"""

from __future__ import annotations

import ctypes
import select
import signal
import socket
import sys
import time
from collections import deque

# From asm-generic/socket.h, linux/if_packet.h and linux/virtio_net.h; Python has no names for them.
_SO_RCVBUFFORCE, _SOL_PACKET, _PACKET_VNET_HDR, _PACKET_IGNORE_OUTGOING = 33, 263, 15, 23
_OFFLOAD_HEADER = 10
_ADDRESS = 6
_ETH_P_ALL = 3
_LARGEST = 1 << 17
_BUFFER = 1 << 26
_PR_SET_PDEATHSIG = 1


def main() -> None:
    """Switch frames for ever. The first line on stdout says that it has begun."""
    # It must not outlive the network that it is a part of.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    seconds, ports = float(sys.argv[1]), [_open(name) for name in sys.argv[2:]]
    places: dict[bytes, socket.socket] = {}  # where hosts are, learned from what they sent
    # In the order of time, as all frames wait equally long: when, where to, and what.
    held: deque[tuple[float, socket.socket, bytes]] = deque()
    print("ready", flush=True)
    while True:
        pause = max(0.0, held[0][0] - time.monotonic()) if held else None
        ready, _, _ = select.select(ports, [], [], pause)
        now = time.monotonic()
        for port in ready:
            frame = port.recv(_LARGEST)
            addresses = frame[_OFFLOAD_HEADER : _OFFLOAD_HEADER + 2 * _ADDRESS]
            places[addresses[_ADDRESS:]] = port
            place = places.get(addresses[:_ADDRESS])
            others = ports if place is None else [place]
            held.extend((now + seconds, other, frame) for other in others if other is not port)
        while held and held[0][0] <= now:
            _, port, frame = held.popleft()
            port.send(frame)


def _open(interface: str) -> socket.socket:
    found = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(_ETH_P_ALL))
    found.setsockopt(_SOL_PACKET, _PACKET_VNET_HDR, 1)
    found.setsockopt(_SOL_PACKET, _PACKET_IGNORE_OUTGOING, 1)
    found.setsockopt(socket.SOL_SOCKET, _SO_RCVBUFFORCE, _BUFFER)
    found.bind((interface, 0))
    return found


if __name__ == "__main__":
    main()
