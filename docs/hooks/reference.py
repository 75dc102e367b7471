"""The pages of the reference: one for each room, one entry for each name that a public module has in `__all__`."""

import griffe
from mkdocs.structure.files import File

ENTRY = """
::: {source}
    options:
      heading: {path}
      toc_label: {name}
      heading_level: {level}
"""
# Another name of an entry that stands elsewhere in full.
POINTER = """
{hashes} {path} {{#{path} data-toc-label="{name}"}}

{summary} In full: [`{home}`][].
"""
MODULE = """
{hashes} {path} {{#{path}}}

::: {path}
    options:
      members: false
      show_root_heading: false
      show_root_toc_entry: false
"""


def on_files(files, config):
    package = griffe.load("manifoldagg", search_paths=["."], allow_inspection=False)
    modules = {module.path: module for module in _inside(package)}
    public = [module for module in modules.values() if "._" not in module.path]
    homes = _homes(public, modules)
    pages = {}
    for module in public:
        room = module if _is_room(module, package) else module.parent
        pages.setdefault(room.name, []).extend(_section(module, module is room, modules, homes))
    for name, sections in pages.items():
        if len(sections) > 1:
            files.append(File.generated(config, f"reference/{name}.md", content="".join(sections)))
    return files


def _is_room(module, package):
    return module is package or module.parent is package or module.is_subpackage


def _inside(module):
    yield module
    for child in module.modules.values():
        if not child.is_alias:
            yield from _inside(child)


def _definition(path, modules):
    """Where a name is defined, along the imports: a function may have the name of its module, and hide it."""
    module, _, name = path.rpartition(".")
    if module in modules and name in modules[module].imports:
        return _definition(modules[module].imports[name], modules)
    return path


def _homes(public, modules):
    """Every definition with the module whose name a reader writes: its package, or itself if no package exports it."""
    homes = {}
    for module in public:
        for name in module.exports or ():
            homes.setdefault(_definition(f"{module.path}.{name}", modules), []).append(module)
    return {
        definition: max(exporters, key=lambda module: (module.is_subpackage, len(module.path)))
        for definition, exporters in homes.items()
    }


def _section(module, is_room, modules, homes):
    """What a module exports: in full where this is its home, with a pointer where its package gives it another name."""
    hashes = "#" if is_room else "##"
    entries = []
    for name in module.exports or ():
        path = f"{module.path}.{name}"
        definition = _definition(path, modules)
        home = homes[definition]
        if home is module:
            # Under the path of a module of the same name, griffe finds the module.
            source = definition if path in modules else path
            anchor = f"\n[](){{#{path}}}\n" if path in modules else ""
            entries.append(anchor + ENTRY.format(source=source, path=path, name=name, level=len(hashes) + 1))
        elif is_room:
            at, _, last = definition.rpartition(".")
            summary = modules[at].members[last].docstring.value.partition("\n\n")[0]
            entries.append(
                POINTER.format(hashes=hashes + "#", path=path, name=name, summary=summary, home=f"{home.path}.{name}")
            )
    return [MODULE.format(hashes=hashes, path=module.path), *entries] if entries or is_room else []
