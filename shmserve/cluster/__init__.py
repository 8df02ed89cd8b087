"""Cluster: decides which of many hosts serves which models, and acts through Ray and HAProxy.
Requests and tensors never pass through this package. Only the module `ray_nodes` needs the
extra `ray`."""
