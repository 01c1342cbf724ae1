"""What the lease costs beside other locks between processes."""
