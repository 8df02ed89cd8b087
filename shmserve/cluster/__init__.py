"""Cluster: decides which of many hosts serves which models, and acts through Ray and HAProxy.
Requests and tensors never pass through this package. Without the extra `ray`, no module of the
package is imported."""
