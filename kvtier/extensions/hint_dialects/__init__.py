"""Hints that clients already send in the forms of others, such as Dynamo's and Anthropic's."""
