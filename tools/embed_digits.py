"""Write the digits of scikit-learn into docs/playground.html: `python tools/embed_digits.py`.

The page holds one line: base64 of zlib of the labels and then the pixels (0 to 16) of all examples, one byte each, test examples first.
"""

import re
import zlib
from base64 import b64decode, b64encode
from pathlib import Path

import numpy as np

from fedsieve.data.builtin import load_digits

PAGE = Path(__file__).parents[1] / "docs" / "playground.html"
ELEMENT = re.compile(r'(<script id="digits" type="application/octet-stream">)(.*?)(</script>)')


def digits() -> bytes:
    """Return the labels and the pixels of the task `digits`."""
    train, test, *_ = load_digits(None)
    x, y = np.concatenate((np.asarray(test[0]), np.asarray(train[0]))), np.concatenate((test[1], train[1]))
    return np.concatenate((y, (16 * x).reshape(-1))).astype(np.uint8).tobytes()


def embedded_digits(page: str) -> bytes:
    """Return the labels and pixels that a page holds."""
    (found,) = ELEMENT.findall(page)
    return zlib.decompress(b64decode(found[1]))


def embed(page: str) -> str:
    """Return the page with the digits."""
    return ELEMENT.sub(lambda found: found[1] + b64encode(zlib.compress(digits(), 9)).decode() + found[3], page)


if __name__ == "__main__":
    PAGE.write_text(embed(PAGE.read_text()))
