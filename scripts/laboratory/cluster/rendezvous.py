"""Horovod's rendezvous server for hosts given as host0:1,host1:1. It prints its port, and runs until it is killed."""

import signal
import sys

from horovod.runner.common.util.hosts import get_host_assignments, parse_hosts
from horovod.runner.http.http_server import RendezvousServer

hosts = parse_hosts(sys.argv[1])
server = RendezvousServer()
port = server.start()
server.init(get_host_assignments(hosts, sum(host.slots for host in hosts)))
print(port, flush=True)
signal.pause()
