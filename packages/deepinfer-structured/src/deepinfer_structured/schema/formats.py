"""The standard `format`s as languages.

`inside` holds only texts that have the format. `outside` of its second language, all texts lack it; None where no such
language is known. Where they differ, generation is held to the common, plain spellings (no leap seconds, no punycode).
"""

from __future__ import annotations

import functools

from deepinfer_structured.regex import Node as Language
from deepinfer_structured.regex import language

_DAY = r"(?:(?:0[13578]|1[02])-(?:0[1-9]|[12]\d|3[01])|(?:0[469]|11)-(?:0[1-9]|[12]\d|30)|02-(?:0[1-9]|1\d|2[0-8]))"
_YEAR = r"(?:\d{3}[1-9]|\d\d[1-9]0|\d[1-9]00|[1-9]000)"  # 0001..9999
_LEAP_YEAR = r"(?:\d\d(?:0[48]|[2468][048]|[13579][26])|(?:0[48]|[2468][048]|[13579][26])00)"
_DATE = rf"(?:{_YEAR}-{_DAY}|{_LEAP_YEAR}-02-29)"
_TIME = r"(?:[01]\d|2[0-3]):[0-5]\d:[0-5]\d(?:\.\d+)?(?:[zZ]|[+-](?:[01]\d|2[0-3]):[0-5]\d)"
_TIME_PART = r"T(?:\d+H(?:\d+M(?:\d+S)?)?|\d+M(?:\d+S)?|\d+S)"
_DATE_PART = r"(?:\d+Y(?:\d+M(?:\d+D)?)?|\d+M(?:\d+D)?|\d+D)"
_OCTET = r"(?:25[0-5]|2[0-4]\d|1\d\d|[1-9]?\d)"
_IPV4 = rf"{_OCTET}(?:\.{_OCTET}){{3}}"
_H16 = r"[\da-fA-F]{1,4}"
_LS32 = rf"(?:{_H16}:{_H16}|{_IPV4})"
_IPV6 = "|".join(
    [rf"(?:{_H16}:){{6}}{_LS32}", rf"::(?:{_H16}:){{5}}{_LS32}"]
    + [rf"(?:(?:{_H16}:){{0,{n}}}{_H16})?::(?:{_H16}:){{{4 - n}}}{_LS32}" for n in range(5)]
    + [rf"(?:(?:{_H16}:){{0,5}}{_H16})?::{_H16}", rf"(?:(?:{_H16}:){{0,6}}{_H16})?::"]
)
_LABEL = r"(?:[a-zA-Z\d](?:[a-zA-Z\d](?:[a-zA-Z\d](?:-?[a-zA-Z\d])*)?)?|[a-zA-Z\d]-[a-zA-Z\d](?:-?[a-zA-Z\d])*)"
_HOST = rf"(?=.{{1,253}}$)(?!.*[^.]{{64}}){_LABEL}(?:\.{_LABEL})*"
_ATEXT = r"[a-zA-Z\d!#$%&'*+/=?^_`{|}~-]+"
_LOCAL = rf"{_ATEXT}(?:\.{_ATEXT})*"
_DOMAIN = r"[a-zA-Z\d](?:[a-zA-Z\d-]{0,61}[a-zA-Z\d])?(?:\.[a-zA-Z\d](?:[a-zA-Z\d-]{0,61}[a-zA-Z\d])?)*"
_UCHAR = r"\u00a0-\ud7ff\uf900-\ufdcf\ufdf0-\uffef"


def _uri(extra: str, *, reference: bool) -> str:
    """RFC 3986 (RFC 3987 with `extra` characters)."""
    plain = rf"[a-zA-Z\d._~!$&'()*+,;={extra}-]"
    pchar = rf"(?:[a-zA-Z\d._~!$&'()*+,;=:@{extra}-]|%[\da-fA-F]{{2}})"
    no_colon = rf"(?:[a-zA-Z\d._~!$&'()*+,;=@{extra}-]|%[\da-fA-F]{{2}})"
    user = rf"(?:{plain}|:|%[\da-fA-F]{{2}})*@"
    host = rf"(?:\[(?:{_IPV6})\]|(?:{plain}|%[\da-fA-F]{{2}})*)"
    segments = rf"(?:/{pchar}*)*"
    authority = rf"//(?:{user})?{host}(?::\d*)?{segments}"
    absolute = rf"/(?:{pchar}+{segments})?"
    tail = rf"(?:\?(?:{pchar}|[/?])*)?(?:#(?:{pchar}|[/?])*)?"
    full = rf"[a-zA-Z][a-zA-Z\d+.-]*:(?:{authority}|{absolute}|{pchar}+{segments}|){tail}"
    if not reference:
        return full
    return rf"{full}|(?:{authority}|{absolute}|{no_colon}+{segments}|){tail}"


_VARIABLE = r"(?:[a-zA-Z\d_]|%[\da-fA-F]{2})(?:\.?(?:[a-zA-Z\d_]|%[\da-fA-F]{2}))*(?::[1-9]\d{0,3}|\*)?"
_TEMPLATE_TEXT = r"[\x21\x23-\x24\x26\x28-\x3b\x3d\x3f-\x5b\x5d\x5f\x61-\x7a\x7e\u00a0-\ud7ff]|%[\da-fA-F]{2}"
_ESCAPED = r"\\[dDwWsSbBnrtfv.*+?^$|(){}\[\]\\/-]"
_CLASS = rf"\[\^?(?:[a-zA-Z\d_ .,:;@#%&=<>!'\"~`/$*+?(){{}}|]|{_ESCAPED})+\]"
_PIECE = rf"(?:(?:[a-zA-Z\d_ ,:;@#%&=<>!'\"~`/.-]|{_ESCAPED}|{_CLASS})[*+?]?)"
_SIMPLE_REGEX = rf"\^?(?:{_PIECE}|\((?:\?:)?{_PIECE}+(?:\|{_PIECE}+)*\)[*+?]?)*(?:\|{_PIECE}+)*\$?"

# name: (inside, wider language that holds every text of the format, or None)
_FORMATS: dict[str, tuple[str, str | None]] = {
    "date": (_DATE, _DATE),
    "time": (_TIME, r"\d\d:\d\d.*"),
    "date-time": (rf"{_DATE}[tT]{_TIME}", r"\d{4}-\d\d-\d\d.*"),
    "duration": (rf"P(?:{_DATE_PART}(?:{_TIME_PART})?|{_TIME_PART}|\d+W)", r"[pP].*"),
    "ipv4": (_IPV4, _IPV4),
    "ipv6": (_IPV6, r"[\da-fA-F:.]+(?:%.*)?"),
    "hostname": (_HOST, r"[^ ]+"),
    "idn-hostname": (_HOST, None),
    "email": (rf"{_LOCAL}@{_DOMAIN}", r"[^@]*@(?:.|\n|\r|\u2028|\u2029)*"),
    "idn-email": (rf"{_LOCAL}@{_DOMAIN}", r"[^@]*@(?:.|\n|\r|\u2028|\u2029)*"),
    "uri": (_uri("", reference=False), r"[a-zA-Z][a-zA-Z\d+.-]*:(?:.|\n|\r|\u2028|\u2029)*"),
    "uri-reference": (_uri("", reference=True), None),
    "iri": (_uri(_UCHAR, reference=False), r"[a-zA-Z][a-zA-Z\d+.-]*:(?:.|\n|\r|\u2028|\u2029)*"),
    "iri-reference": (_uri(_UCHAR, reference=True), None),
    "uri-template": (
        rf"(?:{_TEMPLATE_TEXT}|\{{[+#./;?&]?{_VARIABLE}(?:,{_VARIABLE})*\}})*",
        None,
    ),
    "uuid": (r"[\da-fA-F]{8}-[\da-fA-F]{4}-[\da-fA-F]{4}-[\da-fA-F]{4}-[\da-fA-F]{12}",) * 2,
    "json-pointer": (r"(?:/(?:[^~/]|~[01])*)*",) * 2,
    "relative-json-pointer": (r"(?:0|[1-9]\d*)(?:#|(?:/(?:[^~/]|~[01])*)*)", r"\d.*"),
    "regex": (_SIMPLE_REGEX, None),
}


@functools.cache
def format_languages(name: str) -> tuple[Language, Language | None] | None:
    """The language of a format and one that holds every text of it; None for names that are not standard."""
    if name not in _FORMATS:
        return None
    inside, outside = _FORMATS[name]
    return language(f"^(?:{inside})$"), language(f"^(?:{outside})$") if outside else None
