"""LaTeX sources of any quality: nothing raises, no text is lost, and the work grows as the source does."""

import random
import re

import pytest

from gristmill.data_pipeline.readers import latex  # after the check
from gristmill.data_pipeline.readers.source import SourceConfig
from gristmill.data_pipeline.readers.whole_files import Refused

SOURCE = SourceConfig(name="s", format="latex", paths=("a.tex",))
MARKDOWN = SourceConfig(name="s", format="latex", paths=("a.tex",), blocks={"format": "markdown"})


def read(source: str, config: SourceConfig = SOURCE) -> str:
    (record,) = latex.convert_latex(source.encode("utf-8", "replace"), config)
    return record.text


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("a \\frac{b}", "a b"),  # its second argument is missing
        ("a \\frac", "a"),
        ("a \\footnote", "a"),
        ("a \\sqrt[3", "a 3"),
        ("a \\verb", "a"),
        ("a \\begin", "a \\begin"),
        ("a $\\frac{b}", "a $\\frac{b}"),
        ("\\cite{b, a text that goes on. \\emph{To} its end.", "b, a text that goes on. To its end."),
        ("{\\label{b text.\n\nMore} text", "b text.\n\nMore text"),
        ("\\begin{verbatim}\na\n\\begin{verbatim} b", "a\n\\begin{verbatim} b"),
        ("See \\href{http://a.b}{a \\emph{mill}}.", "See a mill <http://a.b>."),
        ("\\part{One} a \\paragraph{Two} b", "One\n\na\n\nTwo\n\nb"),
        ("\\texttt{a} \\textsf{b} \\mbox{c} \\textup{d}", "a b c d"),
        ("\\newcommand{\\x}[1]{a\n\nb}\\x{c}", "c"),
        ("$[0,\\infty)$ " * 200, " ".join(["$[0,\\infty)$"] * 200)),  # no nesting
    ],
)
def test_what_is_there_is_read(source, text):
    assert read(source) == text


def test_the_title_stands_where_the_document_writes_it():
    """Neither a name for what is missing nor the date of the day."""
    paper = r"\title[Short]{On \emph{mills}\thanks{A grant.}}\begin{document}\maketitle \today A text.\end{document}"
    (record,) = latex.convert_latex(paper.encode(), MARKDOWN)
    assert record.text == "# On mills\n\nA text." and record.metadata == {"title": "On mills"}
    assert read("\\begin{document}\\maketitle A text.") == "A text."


WORDS = re.compile(r"w\d{3}q")
PAPER = r"""\documentclass[11pt]{article}\usepackage{amsmath}\newcommand{\mill}[1]{\emph{#1}}
\begin{document}\begin{abstract}W W W\end{abstract}\section{W W}\label{sec:a}
W W $v=\frac{d}{t}$ W \emph{W W} \textbf{W \textit{W}} W~\cite{a,b} W.

W \frac{W}{W} \sqrt[3]{W} W caf\'e na\"{\i}ve W \footnote{W \url{http://a.b/c_d}} W
\begin{itemize}\item W\item[W] W\begin{enumerate}\item W W\end{enumerate}\end{itemize}
\[ \sum_{i=0}^n x_i \left( a \right) \] W \begin{equation}\label{eq:b} E=mc^2 \end{equation} W
\begin{align*} a&=b\\ c&=d \end{align*} W \subsection*{W} \(a<b\) W \verb|a_b W| W \\[2pt] W

\href{http://x.y}{W} ``W'' -- W \textquotedblleft W \begin{lstlisting}[language=C]
#include <W.h>
  int W;
\end{lstlisting}
\begin{verbatim}
W { W
\end{verbatim} W \begin{figure}[ht]\centering\includegraphics[width=3cm]{mill}\caption{W W}\end{figure} W
\begin{tabular}{|l|r|}\hline W & W \\ \hline W & W \\ \end{tabular} {\bf W} {\large W} \textsc{W}

\paragraph{W} W \mill{W} \ref{sec:a} 100\% \& \# \_ \{W\} $$x^2$$ W \begin{theorem} W \begin{proof} W
\end{proof}\end{theorem} \begin{quote}W W\end{quote} \input{x} \'{e} \c{c} \o \ss \ae \dots W W
\end{document}"""
PIECES = (
    "{", "}", "[", "]", "\\", "$", "\\begin{", "\\end{", "\\frac", "\\sqrt[", "\\verb|", "\\item[", "&", "^", "_",
    "\\'", "\\(", "\\[", "~", "#", "\\left", "$$", "\\def\\a", "\\newcommand{", "\\href{", " ", "\n\n", "`", "-",
    "\\section", "\\caption[", "\\footnote", "\\cite[", "\\begin{tabular}", "\\\\[", "\\begin{verbatim}", "\\end{a}",
)  # fmt: skip
MAX_DAMAGED_WORDS = 4  # beside a place that was changed: \w001q is a macro, and an argument of \cite is no text


def damaged(paper: str, rng: random.Random) -> tuple[str, int]:
    """(the paper cut off, or with pieces put in and taken out, the number of places)."""
    at = rng.randrange(len(paper))
    if rng.random() < 0.3:
        return paper[:at], 1
    num_places = rng.randint(1, 4)
    for _ in range(num_places):
        at = rng.randrange(len(paper))
        paper = paper[:at] + rng.choice((*PIECES, "")) + paper[at + rng.choice((0, 0, 1, 2, 20)) :]
    return paper, num_places


def lost_words(seed: int) -> tuple[list[str], int, str]:
    """(words of the damaged paper that are not in its text, changed places, the damaged paper)."""
    numbers = iter(range(1000))
    paper = re.sub("W", lambda match: f"w{next(numbers):03}q", PAPER)
    paper, num_places = damaged(paper, random.Random(seed))
    try:
        text = read(paper)
    except Refused as refused:
        assert refused.kind == "no_text"
        text = ""
    kept = set(WORDS.findall(text))
    return [word for word in WORDS.findall(paper) if word not in kept], num_places, paper


@pytest.mark.parametrize("part", range(4))
def test_a_damaged_paper_loses_no_text(part):
    """Law: words are lost beside the damage only."""
    for seed in range(100 * part, 100 * part + 100):
        lost, num_places, paper = lost_words(seed)
        assert len(lost) <= MAX_DAMAGED_WORDS * num_places, (seed, lost, paper)


ENDLESS = (
    "\\frac{", "\\sqrt[", "\\cite[a ", "\\textcolor{", "\\footnote[", "\\begin{a}", "\\begin{tabular}[", "{", "[", "$",
    "\\(", "\\[", "\\verb|a", "\\verb", "\\begin", "\\begin{verbatim}", "\\begin{lstlisting}[", "\\end{a}", "}", "a ",
    "a,b;", "\\item[", "\\\\[", "\\'", "\\def\\a{", "%\n", "\\title{", "\\section*", "$a$ $", "\\begin{minted}{",
)  # fmt: skip


@pytest.mark.parametrize("opening", ENDLESS)
def test_the_work_is_linear(opening, monkeypatch):
    """Steps of the parser on a source, and on one of twice the length; those that nest too deep are refused."""
    steps = 0
    get_token = latex.latexwalker.LatexWalker.get_token

    def counted(*arguments, **options):
        nonlocal steps
        steps += 1
        return get_token(*arguments, **options)

    monkeypatch.setattr(latex.latexwalker.LatexWalker, "get_token", counted)
    counts = []
    for size in (2000, 4000):
        steps = 0
        try:
            read("A text. " + opening * (size // len(opening)))
        except Refused as refused:
            assert refused.kind == "nested_too_deep"
        counts.append(steps)
    assert counts[1] <= 2.2 * counts[0] + 20
    assert counts[1] <= 3 * 4000


STRUCTURES = {
    "lists": (
        r"\begin{enumerate}\item a \begin{itemize}\item b\item[(c)] d\end{itemize}\item e\end{enumerate}f",
        "1. a\n  - b\n  (c) d\n2. e\n\nf", None,
    ),
    "paragraphs of an item": ("\\begin{itemize}\\item a\n\nb\\end{itemize}", "- a\n\n  b", None),
    "a table": (
        r"a \begin{tabular}{lr}\toprule b & c|d \\ \cline{1-2} $x$ & \multicolumn{1}{c}{e \textbf{f}} \\\end{tabular}",
        "a\n\nb | c|d\n$x$ | e f", "a\n\n| b | c\\|d |\n| --- | --- |\n| $x$ | e f |",
    ),
    "rules of a table, and its caption": (
        r"\begin{table}[t]\caption[A]{A table.}\begin{tabular}{ll}a & b\\ \cmidrule[1pt](lr){1-2} "
        r"\addlinespace[2pt] c & d\end{tabular}\end{table}", "A table.\n\na | b\nc | d",
        "A table.\n\n| a | b |\n| --- | --- |\n| c | d |",
    ),
    "a long table, whose head stands twice": (
        r"\begin{longtable}[c]{@{}l p{(\linewidth - 2\tabcolsep) * \real{0.5}}@{}}\caption{A.}\tabularnewline a & b\\"
        "\n\\endfirsthead a & b\\\\\n\\endhead foot\\\\\n\\endlastfoot c & d\\\\\\end{longtable}",
        "A.\n\na | b\nc | d", "A.\n\n| a | b |\n| --- | --- |\n| c | d |",
    ),
    "boxes": (
        r"\begin{minipage}[t]{0.5\textwidth}a\end{minipage} \parbox[b]{2cm}{b} \resizebox{\linewidth}{!}{c} "
        r"\raisebox{1ex}{d} \colorbox{red}{e} \rule[1pt]{0.5\linewidth}{0.5pt} \scalebox{0.5}{f}", "a b c d e  f", None,
    ),
    "numbers of a list": (
        "\\begin{enumerate}\n\\def\\labelenumi{\\arabic{enumi})}\n\\setcounter{enumi}{4}\n\\item a \\item b"
        "\\end{enumerate}", "5. a\n6. b", None,
    ),
    "a note of two paragraphs": ("a\\footnote{b\n\nc} d", "a[b c] d", None),
    "addresses": (
        r"\url{http://a.b/c%20d?e=f&g#h} \href{http://a.b/\%7ec}{d} e% f",
        "<http://a.b/c%20d?e=f&g#h> d <http://a.b/%7ec> e", None,
    ),
    "what is no text in a listing": (
        "\\begin{verbatim}\n\\cmidrule(l){1-2} \\url{%}\n\\end{verbatim}", "\\cmidrule(l){1-2} \\url{%}",
        "```\n\\cmidrule(l){1-2} \\url{%}\n```",
    ),
    "code that pandoc colours": (
        "\\begin{Highlighting}[]\n\\KeywordTok{if}\\NormalTok{ x }\\OperatorTok{\\textgreater{}}\\NormalTok{ }"
        "\\DecValTok{0}\\NormalTok{:}\n\\NormalTok{    y }\\OperatorTok{=}\\NormalTok{ \\{\\}}\n\\end{Highlighting}",
        "if x > 0:\n    y = {}", "```\nif x > 0:\n    y = {}\n```",
    ),
    "units": (
        r"\SI{5}{\kilo\metre\per\hour}, \qty{3}{\percent}, \num{1e5}, \si{\micro\second}",
        "5 km/h, 3 %, 1e5, \u00b5s", None,
    ),
    "algorithms": (r"\begin{algorithm}[t]\begin{algorithmic}[1]\State a\end{algorithmic}\end{algorithm}", "a", None),
    "a table of a width": (
        r"\begin{tabularx}{\textwidth}{lX} a & b\end{tabularx}", "a | b", "| a | b |\n| --- | --- |",
    ),
    "a table without its argument": (r"{a \begin{tabular}}b & c", "a\n\nb | c", "a\n\n| b | c |\n| --- | --- |"),
    "theorems": (r"\begin{theorem}[A]b.\end{theorem}\begin{proof}c.\end{proof}", "b.\n\nc.", None),
    "a drawing": (r"a \begin{tikzpicture}\draw (0,0) -- (1,1);\end{tikzpicture}b", "a b", None),
    "a drawing without an end": (r"a \begin{tikzpicture} b", "a  b", None),
    "references": (
        r"\begin{thebibliography}{9}\bibitem[A]{a} Ann.\bibitem{b} Bob.\end{thebibliography}", "Ann.\n\nBob.", None,
    ),
    "signs": (
        r"\S 3 \LaTeX{} a \textless{} b \textbar{} c \~{}d 10\^{}5 \~{n}",
        "\u00a7 3 LaTeX a < b | c ~d 10^5 \u00f1", None,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", STRUCTURES)
def test_structures_of_a_paper(name):
    source, text, markdown = STRUCTURES[name]
    assert read(source) == text
    assert read(source, MARKDOWN) == (text if markdown is None else markdown)
