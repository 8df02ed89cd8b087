"""The executor's loops: channels to frontends, requests one by one, streams of answers."""
