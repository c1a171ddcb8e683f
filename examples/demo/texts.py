"""What the demo asks: ordinary text, some starting alike, some too long for one prefill chunk."""

from sglang.test.routed_experts.client import Ask

NEW_TOKENS = 40

_GUIDE = (
    "You are the librarian of a small town. People ask you for books and you answer kindly, in one "
    "sentence, and you never recommend the same book twice.\n\nVisitor: "
)
_STORY = (
    "The river rose in the night. By the time the baker lit her oven, water stood in the lower "
    "street, and the ferryman had tied his boat to the church door. Nobody was afraid yet. "
)

# Sent first, together. The demo's table of experts shows the first one.
FIRST = [
    Ask("Which experts see this?", "/generate", new_tokens=NEW_TOKENS),
    Ask("def fibonacci(n: int) -> int:\n    return", "/v1/completions", new_tokens=NEW_TOKENS),
    Ask("Wie spät ist es in Zürich? 东京现在几点?", "/v1/chat/completions", new_tokens=NEW_TOKENS),
    Ask(_GUIDE + "something about the sea, please.", "/generate", new_tokens=NEW_TOKENS),
    Ask(_STORY * 8, "/generate", new_tokens=NEW_TOKENS),
    Ask("A longer letter. " + _STORY * 6, "/v1/chat/completions", new_tokens=NEW_TOKENS),
]

# Sent when the first are answered: these start like one of them, so their beginnings come from the
# cache.
THEN = [
    Ask(_GUIDE + "a detective story for the train.", "/generate", new_tokens=NEW_TOKENS),
    Ask(_GUIDE + "what do children read today?", "/v1/completions", new_tokens=NEW_TOKENS),
    Ask(_STORY * 8 + "Then the bell rang.", "/v1/completions", new_tokens=NEW_TOKENS),
]
