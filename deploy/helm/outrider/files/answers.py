"""`helm test`: a ready server lists its model, answers a request, and shows its metrics."""

import json
import os
import ssl
import sys
import urllib.request

URL = os.environ["URL"]
KEYS = os.environ.get("KEYS", "")
KEY = (json.loads(KEYS) if KEYS.lstrip().startswith("[") else KEYS.split(","))[0].strip()


def call(path, body=None):
    """The text that the server answers with; raises when it refuses."""
    headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {KEY}"} if KEY else {})
    request = urllib.request.Request(URL + path, json.dumps(body).encode() if body else None, headers)
    # The certificate's authority is the cluster's own affair.
    trust = ssl._create_unverified_context() if URL.startswith("https") else None
    with urllib.request.urlopen(request, timeout=120, context=trust) as answer:
        return answer.read().decode()


call("/ready")
model = json.loads(call("/v1/models"))["data"][0]["id"]
answer = json.loads(call("/v1/completions", {"model": model, "prompt": "One, two,", "max_tokens": 4}))
sys.stdout.write(f"{model} says {answer['choices'][0]['text']!r} ({answer['usage']})\n")
backends = [line for line in call("/metrics").splitlines() if "backend_info{" in line]
sys.stdout.write("\n".join(backends) + "\n")
