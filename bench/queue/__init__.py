"""What a person feels of a policy: time to the first token behind engines that share one queue."""
