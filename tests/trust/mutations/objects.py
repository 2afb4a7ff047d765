"""What is believed of an object store, what is kept there, and what its faults may cost."""

from __future__ import annotations

from tests.trust.mutations.room import PYTEST, Mutant, Room

_BUCKET = "extensions/objects/bucket.py"
_CHILD = "extensions/objects/child.py"

ROOM = Room(
    {
        "hostile": (*PYTEST, "tests/unit/extensions/objects/test_hostile_bucket.py"),
        "library": (*PYTEST, "tests/unit/extensions/away_tiers/test_library_process.py"),
        "corruption": ("-m", "tests.trust", "--only", "objects"),
        "faults": (*PYTEST, "tests/fault/test_object_faults.py", "-m", "not slow"),
        "tier": (*PYTEST, "tests/contract/test_object_tier.py", "-m", "not slow"),
        "store": (
            *PYTEST,
            "tests/integration/test_object_store.py",
            "-k",
            "clear or sealed or plan",
        ),
        "plan": (*PYTEST, "tests/unit/autoconfig/test_plan.py", "-k", "bucket"),
    },
    (
        # ---- a chunk ----
        Mutant(
            "WholeObjectTier.read",
            "found == header(key, into)",
            "found",
            "a wrong checksum is believed",
        ),
        Mutant(
            "object_layout.header",
            "digest.update(payload)",
            "",
            "a wrong byte of a payload is served",
        ),
        Mutant(
            "BucketCalls.get",
            "if taken.nbytes > left.nbytes:\n    return False",
            "if taken.nbytes > left.nbytes:\n    return True",
            "an object that is longer than it says is taken",
        ),
        Mutant(
            "WholeObjectTier.read",
            "self.delete(key)",
            "",
            "a damaged chunk is read again and again",
        ),
        Mutant(
            "WholeObjectTier.read",
            "if found is None:\n    self._events.add('misses')\n    return False",
            "if found is None:\n    self._events.add('misses')\n    return True",
            "a chunk that is not there is a hit",
        ),
        Mutant(
            "BucketCalls.get",
            "return None",
            "return False",
            "a chunk that a lifecycle rule took counts as corrupt",
        ),
        # ---- a hostile bucket ----
        Mutant(
            "Bucket.__init__",
            "_ANSWER_S + chunk_bytes // _SLOWEST",
            "100 * (_ANSWER_S + chunk_bytes // _SLOWEST)",
            "a bucket that drips holds a lane",
        ),
        Mutant(
            "BucketCalls.get",
            "answer.stream(_PIECE_BYTES)",
            "[answer.bytes()]",
            "an object without end takes all memory",
        ),
        Mutant(
            "Bucket.__init__",
            "client |= {'proxy_url': _NOWHERE, 'proxy_excludes': ','.join(hosts)}",
            "pass",
            "a redirect of the endpoint reaches any host",
        ),
        Mutant(
            "Bucket.__init__",
            "Library('the object store', _CHILD, sys.executable, lambda: setup, _BEGIN_S, "
            "_MOST_BYTES)",
            "Library('the object store', _CHILD, sys.executable, lambda: setup, _BEGIN_S)",
            "a refusal without end takes all memory",
        ),
        Mutant(
            "library_main._fault",
            "str(error)[:_MOST_TEXT]",
            "str(error)",
            "all of a refusal comes into the engine",
        ),
        Mutant(
            "_Process._answer",
            "self._kill()\nraise LibraryError(why)",
            "raise LibraryError(why)",
            "what a call that was given up answers is taken for the next one's",
        ),
        # ---- the library's process ----
        Mutant(
            "_Process._answer",
            "connection.recv_bytes(_MOST_ANSWER)",
            "connection.recv_bytes()",
            "an answer without end takes all memory",
        ),
        Mutant(
            "library_process._bounded",
            "ours.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)",
            "ours.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, bytes(16))",
            "half an answer is waited for without end",
        ),
        Mutant(
            "library_process._bounded",
            "ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)",
            "ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, bytes(16))",
            "a process that takes no question holds a lane",
        ),
        Mutant(
            "LibraryProcess.seat",
            "self._process is None or self._process.over",
            "self._process is None",
            "a library that crashed once is never used again",
        ),
        Mutant(
            "_Process._answer",
            "self._kill()\nraise",
            "raise",
            "the answer to a call that was broken off is taken for the next one's",
        ),
        Mutant(
            "_Process.__init__",
            "view[index * room:(index + 1) * room]",
            "view[:room]",
            "two calls at once write into each other's chunks",
        ),
        Mutant(
            "_Process.asked",
            'f"{self._library.name}\'s library fails ({kind})"',
            'f"{self._library.name}\'s library fails ({text})"',
            "an answer with a secret in it is logged",
        ),
        Mutant(
            "library_main.main",
            "(most, most)",
            "(-1, -1)",
            "a flood takes the host's memory",
        ),
        Mutant(
            "library_main.main",
            "resource.setrlimit(resource.RLIMIT_CORE, (0, 0))",
            "resource.setrlimit(resource.RLIMIT_CORE, (-1, -1))",
            "a crash leaves chunks in a file on the disk",
        ),
        Mutant(
            "library_main.main",
            "os.getppid() != parent",
            "not os.getppid()",
            "a library outlives the engine that it served",
        ),
        Mutant(
            "library_main._serve",
            "try:\n    ...\nexcept Exception as error:\n    ...",
            "try:\n    ...\nexcept OSError as error:\n    ...",
            "an error of the library ends its call for ever",
        ),
        Mutant(
            "BucketCalls._place",
            "self._memory[seat * self._room:]",
            "self._memory",
            "two requests at once read into each other's chunks",
        ),
        Mutant(
            "BucketCalls.next_page",
            "[[each['path'], each['size'], each['last_modified'].timestamp()] for each in "
            "page if len(each['path']) <= _MOST_NAME]",
            "[[each['path'], each['size'], each['last_modified'].timestamp()] for each in page]",
            "one long name costs all of a list",
        ),
        Mutant(
            "BucketCalls.put",
            "obstore.put(self._store, name, self._place(seat, length), "
            "use_multipart=in_parts, chunk_size=_PART_BYTES, attributes=attributes)",
            "obstore.put(self._store, name, self._place(seat, length), "
            "use_multipart=in_parts, chunk_size=_PART_BYTES, attributes=None)",
            "no object says whose it is, and no tenant can drop its own",
        ),
        # ---- writes and deletes ----
        Mutant(
            "BucketCalls.put",
            "self._place(seat, length)",
            "self._place(seat, length)[:80]",
            "a part of a chunk is visible as a whole one",
        ),
        Mutant(
            "Bucket.put",
            "length >= _MULTIPART_BYTES",
            "False",
            "a chunk of gigabytes goes in one request, which is over its time",
        ),
        Mutant(
            "WholeObjectTier.write",
            "self._owed.add([key])",
            "pass",
            "an object whose write was not confirmed stays for ever",
        ),
        Mutant(
            "WholeObjectTier.write",
            "self._owed.add([key])\nreturn False",
            "self._owed.add([key])\nreturn True",
            "a write that failed counts as done",
        ),
        Mutant(
            "WholeObjectTier.write",
            "not self._owed.cancel(key)",
            "False",
            "what is written anew is deleted by what was owed",
        ),
        Mutant(
            "WholeObjectTier._unlink",
            "self._owed.add(keys)",
            "pass",
            "deletes that were not done are forgotten",
        ),
        Mutant(
            "AwayTier._answered",
            "self._owed.make_good()",
            "pass",
            "owed deletes are never made good",
        ),
        Mutant(
            "BucketCalls.delete",
            "obstore.delete",
            "obstore.head",
            "nothing is ever deleted",
        ),
        Mutant(
            "ObjectTier.held_of",
            "whose is not None and may(owner, whose, shared=True)",
            "whose is not None",
            "a purge of one tenant deletes everyone's objects",
        ),
        Mutant(
            "ObjectTier.held_of",
            "(list(stamps), whole)",
            "([], True)",
            "a purge leaves what other hosts wrote, and says that nothing is left",
        ),
        Mutant(
            "ObjectTier._listed",
            "found is not None",
            "True",
            "a search that a fault cut short is said to be whole",
        ),
        Mutant(
            "ObjectTier._listed",
            "(stamps, False)",
            "(stamps, True)",
            "a search that is cut by its bounds is said to be whole",
        ),
        Mutant(
            "WholeObjectTier.read",
            "self._deletions.begun != ended",
            "False",
            "a read beside a deletion deletes what was written there since",
        ),
        Mutant(
            "ObjectTier._listed",
            "self._clock() < until and len(stamps) < _MOST_LISTED",
            "len(stamps) < _MOST_LISTED",
            "a list without end holds up the start",
        ),
        # ---- looking up ----
        Mutant(
            "ObjectTier.find",
            "if (there := self._has(keys[middle - 1])) is None:\n    return held",
            "if (there := self._has(keys[middle - 1])) is None:\n    there = True",
            "an error in a search is taken for a hit",
        ),
        Mutant(
            "ObjectTier.find",
            "not self._has(key)",
            "self._has(key) is False",
            "of a short run an error is taken for a hit",
        ),
        Mutant(
            "ObjectTier.find",
            "not self._has(keys[0])",
            "self._has(keys[0]) is False",
            "of a long run an error is taken for a hit",
        ),
        Mutant(
            "BucketCalls.has",
            "return False",
            "return True",
            "a lookup believes what is gone to be there",
        ),
        Mutant(
            "ObjectTier.find",
            "len(keys) + 1",
            "len(keys)",
            "the last chunk of a run is never found",
        ),
        Mutant(
            "objects.tier",
            "_ALL_ASKED = 8",
            "_ALL_ASKED = 128",
            "a lookup costs a request for each chunk",
        ),
        Mutant(
            "away.AwayTier",
            "shared = True",
            "shared = False",
            "no host finds another's chunks",
        ),
        # ---- whose objects, and how many ----
        Mutant(
            "ObjectForm.__init__",
            "f'kvtier-{FORMAT_VERSION}/{namespace.hex()}'",
            "f'kvtier-{FORMAT_VERSION}/'",
            "another layout's objects are recovered and deleted",
        ),
        Mutant(
            "ObjectForm.__init__",
            "f'{prefix}/' if prefix else ''",
            "''",
            "chunks lie outside the prefix that rights and rules are for",
        ),
        Mutant(
            "ObjectForm.key",
            "found if found.hex() == text else None",
            "found",
            "names of strangers are taken for chunks",
        ),
        Mutant(
            "objects.parts.open",
            "around.namespace",
            "around.namespace[:8]",
            "servers with different keys meet in a bucket and delete each other's chunks",
        ),
        Mutant(
            "assemble.assemble_store",
            "rest.sealed(opened.tier)",
            "opened.tier",
            "chunks lie in the bucket in the clear though a key is given",
        ),
        Mutant(
            "WholeObjectTier.__init__",
            "bytes_ // self.chunk_room",
            "bytes_ // chunk_bytes",
            "more is kept than the budget",
        ),
        Mutant(
            "AwayTier._newest",
            "order[max(0, len(order) - self.capacity):]",
            "order",
            "after a start more is held than the budget",
        ),
        Mutant(
            "ObjectTier._listed",
            "key is not None and HEADER_BYTES < size <= self.chunk_room",
            "key is not None",
            "objects that can be no chunk count against the budget",
        ),
        # ---- faults ----
        Mutant(
            "WholeObjectTier._call",
            "self._closed or not self._breaker.allows()",
            "self._closed",
            "a store that is dead is asked by every request",
        ),
        Mutant(
            "WholeObjectTier.may_read",
            "self._breaker.reserves()",
            "True",
            "reads from a store that is away take slots from everybody",
        ),
        Mutant(
            "WholeObjectTier.__init__",
            "self._failed(self._breaker, 'failed_finds', store.told(error))",
            "raise RuntimeError('away') from error",
            "a store that is away ends the start",
        ),
        # ---- words at the start ----
        Mutant(
            "Bucket.greet",
            "back is None or bytes(back) != text",
            "back is None",
            "a store that gives other bytes than were written is used",
        ),
        Mutant(
            "Bucket.greet",
            "self.hopeless(error)",
            "None",
            "wrong credentials are waited for without end",
        ),
        Mutant(
            "objects.bucket",
            "{'InvalidAccessKeyId': 'the access key is not known there; correct "
            "{environment}', 'SignatureDoesNotMatch': _KEY, 'AuthenticationFailed': _KEY, "
            "'ExpiredToken': _TOKEN, 'InvalidToken': _TOKEN, 'InvalidClientTokenId': _TOKEN, "
            "'RequestTimeTooSkewed': \"this host's clock is too far from the store's; set the "
            "clock\", 'RequestExpired': \"this host's clock is too far from the store's; set "
            "the clock\", 'AuthorizationHeaderMalformed': _REGION, 'PermanentRedirect': "
            "_REGION, 'IllegalLocationConstraintException': _REGION, 'NoSuchBucket': "
            "_BUCKET, 'ContainerNotFound': _BUCKET, 'AccessDenied': _DENIED, "
            "'AllAccessDisabled': _DENIED, 'AuthorizationFailure': _DENIED, "
            "'AuthorizationPermissionMismatch': _DENIED}",
            "{'InvalidAccessKeyId': 'the access key is not known there; correct "
            "{environment}', 'SignatureDoesNotMatch': _KEY, 'AuthenticationFailed': _KEY, "
            "'ExpiredToken': _TOKEN, 'InvalidToken': _TOKEN, 'InvalidClientTokenId': _TOKEN, "
            "'RequestTimeTooSkewed ': \"this host's clock is too far from the store's; set "
            "the clock\", 'RequestExpired': \"this host's clock is too far from the store's; "
            "set the clock\", 'AuthorizationHeaderMalformed': _REGION, 'PermanentRedirect': "
            "_REGION, 'IllegalLocationConstraintException': _REGION, 'NoSuchBucket': "
            "_BUCKET, 'ContainerNotFound': _BUCKET, 'AccessDenied': _DENIED, "
            "'AllAccessDisabled': _DENIED, 'AuthorizationFailure': _DENIED, "
            "'AuthorizationPermissionMismatch': _DENIED}",
            "a wrong clock is called wrong credentials",
        ),
        Mutant(
            "bucket.words",
            "' '.join((part for part in (f'HTTP {status}' if status else '', code) if part))",
            "error.text + ' '.join((part for part in (f'HTTP {status}' if status else '', "
            "code) if part))",
            "an answer with a secret in it is logged",
        ),
        Mutant(
            "Bucket.greet",
            "self.delete([trial])",
            "pass",
            "each start leaves an object behind",
        ),
        # ---- the plan ----
        Mutant(
            "objects.plan.plan",
            "_BEFORE_FIRST * (latency.value or 0.0)",
            "0.0",
            "the plan believes a bucket to answer at once",
        ),
        Mutant(
            "objects.plan.plan",
            "not store.reachable.value",
            "False",
            "the plan has a bucket that cannot be reached",
        ),
    ),
)
