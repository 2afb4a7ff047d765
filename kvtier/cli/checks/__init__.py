"""What ``kvtier doctor`` looks at, a file for each subject. What a start tries is in
:mod:`kvtier.started`."""
