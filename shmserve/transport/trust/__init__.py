"""Who is at the other end: certificates, keys, the kernel's credentials of a peer."""
