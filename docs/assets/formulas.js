// pymdownx.arithmatex puts the LaTeX of a formula into \(...\) or \[...\].
for (const element of document.querySelectorAll(".arithmatex")) {
  const latex = element.textContent.trim()
  katex.render(latex.slice(2, -2), element, {
    displayMode: latex.startsWith("\\["),
    throwOnError: false,
    strict: false, // Greek letters may be written directly.
  })
}
