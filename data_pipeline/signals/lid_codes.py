"""Language codes of lid.176 (fasttext.cc, "Language identification": its list of 176 ISO codes)."""

import re

from gristmill.foundation.nearest_name import nearest_name

_CODES = """
af als am an ar arz as ast av az azb ba bar bcl be bg bh bn bo bpy br bs bxr ca cbk ce ceb ckb co cs cv cy da
de diq dsb dty dv el eml en eo es et eu fa fi fr frr fy ga gd gl gn gom gu gv he hi hif hr hsb ht hu hy ia id
ie ilo io is it ja jbo jv ka kk km kn ko krc ku kv kw ky la lb lez li lmo lo lrc lt lv mai mg mhr min mk ml mn
mr mrj ms mt mwl my myv mzn nah nap nds ne new nl nn no oc or os pa pam pfl pl pms pnb ps pt qu rm ro ru rue
sa sah sc scn sco sd sh si sk sl so sq sr su sv sw ta te tg th tk tl tr tt tyv ug uk ur uz vec vep vi vls vo
wa war wuu xal xmf yi yo yue zh
"""
LID_176 = frozenset(_CODES.split())
# What other models call a language: ISO 639-3, with the script or without (GlotLID: deu_Latn).
OTHER_MODELS_LABEL = re.compile(r"[a-z]{3}(?:_[A-Z][a-z]{3})?")


def require_language_code(code: str) -> None:
    """Raises ValueError, which suggests the nearest code, for a code that no model gives: `english`, `xx`, `EN`."""
    if code in LID_176 or OTHER_MODELS_LABEL.fullmatch(code):
        return
    near = nearest_name(code.lower()[:2], sorted(LID_176))
    hint = f"did you mean {near!r}? " if near else ""
    raise ValueError(f"no language has the code {code!r}; {hint}codes are those of ISO 639, such as en, de, zh or deu")
