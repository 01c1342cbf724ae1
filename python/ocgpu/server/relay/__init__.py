"""The byte path: upstream connections, HTTP relay, websocket relay, disconnect watch."""
