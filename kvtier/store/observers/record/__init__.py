"""Recorder: which prompts and hints came, written as a trace without text and tokens."""
