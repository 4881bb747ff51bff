"""`helm test`: a ready server lists its model, answers a request, and shows its metrics."""

import json
import os
import ssl
import urllib.request

URL = os.environ["URL"]
KEYS = os.environ.get("KEYS", "")
KEY = (json.loads(KEYS) if KEYS.lstrip().startswith("[") else KEYS.split(","))[0].strip()


def call(path, body=None):
    headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {KEY}"} if KEY else {})
    request = urllib.request.Request(URL + path, json.dumps(body).encode() if body else None, headers)
    # The certificate's authority is the cluster's own affair.
    trust = ssl._create_unverified_context() if URL.startswith("https") else None
    with urllib.request.urlopen(request, timeout=120, context=trust) as answer:
        return answer.read().decode()


call("/ready")
model = json.loads(call("/v1/models"))["data"][0]["id"]
answer = json.loads(call("/v1/completions", {"model": model, "prompt": "One, two,", "max_tokens": 4}))
print(f"{model} says {answer['choices'][0]['text']!r} ({answer['usage']})")
metrics = call("/metrics")
print("\n".join(line for line in metrics.splitlines() if line.startswith("outrider_backend_info")))
