"""Policies as a person feels them: time to the first token behind engines that share one queue."""
