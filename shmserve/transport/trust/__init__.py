"""Identity of the other end of a connection: certificates, keys, the kernel's credentials."""
