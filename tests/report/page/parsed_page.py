"""A page as a browser would see it."""

import json
from html.parser import HTMLParser

VOID = {"meta", "br", "hr", "col"}


class Page(HTMLParser):
    """A page as a browser would see it: elements in order, text as it reads, and what each <script> holds."""

    def __init__(self, html):
        super().__init__(convert_charrefs=True)
        self.elements, self.open, self.faults = [], [], []
        self.words, self.raw, self.parts = [], {"script": [], "style": []}, {}
        self.feed(html)
        self.close()
        self.faults += [f"<{name}> is never closed" for name in self.open]

    def handle_starttag(self, name, attributes):
        self.elements.append((name, dict(attributes)))
        if name not in VOID:
            self.open.append(name)
        if name in self.raw:
            self.raw[name].append((dict(attributes), []))

    def handle_endtag(self, name):
        if not self.open or self.open.pop() != name:
            self.faults.append(f"</{name}> closes something else")

    def handle_data(self, data):
        inside = self.open[-1] if self.open else None
        if inside in self.raw:
            self.raw[inside][-1][1].append(data)
        else:
            self.words.append(data)
            for name in ("h1", "h2", "figcaption", "blockquote", "pre"):
                if name in self.open:
                    self.parts.setdefault(name, []).append(data)

    @property
    def text(self):
        return " ".join("".join(self.words).split())

    @property
    def headline(self):
        return "".join(self.parts["h1"])

    @property
    def data(self):
        return self.embedded["charts"]

    @property
    def embedded(self):
        (result,) = [pieces for attributes, pieces in self.raw["script"] if attributes.get("id") == "data"]
        return json.loads("".join(result))

    def line(self, chart, label):
        (result,) = [line for line in self.data[chart]["lines"] if line["label"] == label]
        return dict(zip(result["x"], result["y"], strict=True))
