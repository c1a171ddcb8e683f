"""patchkit builds the routed-experts branch: a pinned SGLang base, our files and our edits.

Read in this order: `base` (what we build on), `edits` and `series` (what we change), `splice` (how
an edit lands in a text), `plan` (all of it against one tree, or every reason why it does not fit),
then `branch`, `onto`, `patch` and `wheel` (the forms in which it is delivered).
"""
