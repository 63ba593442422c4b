"""Writes small PDF files."""


def pdf(*pages: str) -> bytes:
    """Return a PDF with a line of text on each page. Its format is described in ISO 32000-1, section 7.5."""
    kids = " ".join(f"{3 + 2 * number} 0 R" for number in range(len(pages)))
    font = "<< /Font << /F << /Type /Font /Subtype /Type1 /BaseFont /Helvetica >> >> >>"
    objects = ["<< /Type /Catalog /Pages 2 0 R >>", f"<< /Type /Pages /Count {len(pages)} /Kids [{kids}] >>"]
    for number, text in enumerate(pages):
        content = f"BT /F 12 Tf 20 100 Td ({text}) Tj ET" if text else ""
        box = f"/MediaBox [0 0 300 200] /Resources {font} /Contents {4 + 2 * number} 0 R"
        objects += [
            f"<< /Type /Page /Parent 2 0 R {box} >>",
            f"<< /Length {len(content)} >>\nstream\n{content}\nendstream",
        ]
    data, offsets = b"%PDF-1.4\n", []
    for number, body in enumerate(objects, 1):
        offsets.append(len(data))
        data += f"{number} 0 obj\n{body}\nendobj\n".encode()
    table = "".join(f"{offset:010} 00000 n \n" for offset in offsets)
    size = len(objects) + 1
    trailer = f"xref\n0 {size}\n0000000000 65535 f \n{table}trailer\n<< /Size {size} /Root 1 0 R >>\n"
    return data + f"{trailer}startxref\n{len(data)}\n%%EOF\n".encode()
