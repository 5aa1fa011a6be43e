"""Sends bytes over TCP, or receives them and prints the payload's bytes per second.

python traffic.py receive ADDRESS:PORT
python traffic.py send ADDRESS:PORT BYTES
"""

import socket
import sys
import time


def main() -> None:
    verb, address = sys.argv[1:3]
    host, port = address.split(":")
    if verb == "send":
        send(host, int(port), int(sys.argv[3]))
    else:
        print(receive(host, int(port)))


def send(host: str, port: int, size: int) -> None:
    with connected(host, port) as connection:
        connection.sendall(bytes(size))


def connected(host: str, port: int) -> socket.socket:
    deadline = time.monotonic() + 10
    while True:
        try:
            return socket.create_connection((host, port), timeout=60)
        except ConnectionRefusedError:  # the receiver is still starting
            if time.monotonic() > deadline:
                raise
            time.sleep(0.02)


def receive(host: str, port: int) -> float:
    with socket.create_server((host, port)) as server:
        connection, _ = server.accept()
    with connection:
        start, received = time.monotonic(), 0
        while arrived := connection.recv(1 << 20):
            received += len(arrived)
        return received / (time.monotonic() - start)


if __name__ == "__main__":
    main()
