"""HTML from Markdown, as the report of an ablation has it."""

import pytest

from experiments.markdown import markdown


@pytest.mark.parametrize(
    "text, html",
    [
        ("# Title", "<h1>Title</h1>"),
        ("### a `b`", "<h3>a <code>b</code></h3>"),
        ("**1.25** and *not run*", "<p><strong>1.25</strong> and *not run*</p>"),
        ("<script>alert(1)</script>", "<p>&lt;script&gt;alert(1)&lt;/script&gt;</p>"),
        ("`python ablate.py --out **x**`", "<p><code>python ablate.py --out **x**</code></p>"),
    ],
)
def test_markdown(text, html):
    assert markdown(text) == html
