"""Checks of ``kvtier doctor``, a file for each subject. Checks of a start are in
:mod:`kvtier.started`."""
