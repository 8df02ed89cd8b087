"""The one way in for every frontend: reserve, send, await, release."""
