"""Sends bytes from rank 1 to rank 0 over TCP and back; the sender of each way prints its rate in Mbit/s."""

import os
import socket
import sys
import time

SIZE = int(sys.argv[1])


def send(peer: socket.socket) -> None:
    """Timed from the first byte to the receiver's answer: a receiver that lags cannot make the link look faster."""
    start = time.perf_counter()
    peer.sendall(bytes(SIZE))
    peer.recv(1)
    print(f"{SIZE * 8e-6 / (time.perf_counter() - start):.1f}")


def receive(peer: socket.socket) -> None:
    left = SIZE
    while left:
        left -= len(peer.recv(min(left, 1 << 16)))
    peer.sendall(b"!")


if os.environ["RANK"] == "0":
    with socket.create_server(("host0", 5000)) as server:
        peer, _ = server.accept()
        with peer:
            receive(peer)
            send(peer)
else:
    for _ in range(100):
        try:
            peer = socket.create_connection(("host0", 5000))
            break
        except ConnectionRefusedError:
            time.sleep(0.05)
    with peer:
        send(peer)
        receive(peer)
