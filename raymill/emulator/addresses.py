"""Addresses inside the emulated network."""

GATEWAY = "172.31.255.1"  # in the default VPC's network, outside its subnets
ENDPOINT = f"http://{GATEWAY}"
CHECK_IP_PORT = 81
CONTROL_PORT = 5599  # on loopback
