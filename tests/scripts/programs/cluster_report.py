"""Prints as JSON who and where this rank is: its variables, host name, addresses and interfaces."""

import json
import os
import socket
from pathlib import Path

names = ["host0", "host1"]
print(
    json.dumps(
        {
            "variables": dict(os.environ),
            "hostname": socket.gethostname(),
            "addresses": {name: socket.gethostbyname(name) for name in [*names, "localhost"]},
            "interfaces": sorted(name for _, name in socket.if_nameindex()),
            "directory": str(Path.cwd()),
        }
    )
)
