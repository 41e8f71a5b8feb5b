// A picture whose marks are pointed at, walked through with the arrow keys, and chosen; its slider moves all states.
// A mark has data-words (its tooltip), data-key (what the kernel gets when it is chosen) and data-group (what stays bright).
function render({model, el}) {
  const root = document.createElement('div'), tip = document.createElement('div');
  root.className = 'mixsd-marks'; root.dataset.lmSuppressShortcuts = 'true';
  tip.className = 'mixsd-tip'; tip.setAttribute('role', 'tooltip');
  el.append(root);
  const all = () => [...root.querySelectorAll('[data-key], [data-words]')].filter(m => m.getClientRects().length);
  const at = e => e.target.closest && e.target.closest('[data-key], [data-words]');
  const centre = m => { const r = m.getBoundingClientRect(); return [r.x + r.width / 2, r.y + r.height / 2]; };
  function enter(m) {
    if (!m || !root.contains(m)) return leave();
    const words = m.dataset.words || '', box = root.getBoundingClientRect(), r = m.getBoundingClientRect();
    tip.textContent = words; tip.hidden = !words;
    const left = Math.min(r.right - box.x + 10, box.width - tip.offsetWidth - 4);
    const over = left < r.right - box.x + 4;
    tip.style.left = Math.max(0, left) + 'px';
    const below = r.bottom - box.y + 8, fits = below + tip.offsetHeight <= box.height;
    const above = Math.max(0, r.y - box.y - tip.offsetHeight - 8);
    tip.style.top = (over ? (fits ? below : above) : r.y - box.y + r.height / 2 - Math.min(20, tip.offsetHeight / 2)) + 'px';
    const mine = (m.dataset.group || '').split(' ');
    for (const other of root.querySelectorAll('[data-group]')) other.classList.toggle('mixsd-dim',
      !!m.dataset.group && !other.dataset.group.split(' ').some(g => mine.includes(g)));
  }
  function leave() {
    tip.hidden = true;
    for (const m of root.querySelectorAll('.mixsd-dim')) m.classList.remove('mixsd-dim');
  }
  function choose(m) {
    for (const other of root.querySelectorAll('.mixsd-picked')) other.classList.remove('mixsd-picked');
    m.classList.add('mixsd-picked');
    if ('key' in m.dataset) model.send({key: JSON.parse(m.dataset.key)});
  }
  function focus(m) { for (const other of all()) other.tabIndex = -1; m.tabIndex = 0; m.focus(); }
  function walk(m, key) {
    const marks = all(), rows = m.classList.contains('mixsd-row');
    if (key === 'Home') return marks[0];
    if (key === 'End') return marks[marks.length - 1];
    if (rows) return marks[marks.indexOf(m) + (key === 'ArrowDown' || key === 'ArrowRight' ? 1 : -1)];
    const [x, y] = centre(m), [dx, dy] = {ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1]}[key];
    let best, least = Infinity;
    for (const other of marks) {
      const [a, b] = centre(other), along = (a - x) * dx + (b - y) * dy, aside = Math.abs((a - x) * dy) + Math.abs((b - y) * dx);
      if (other !== m && along > .5 && along + 2 * aside < least) [best, least] = [other, along + 2 * aside];
    }
    return best;
  }
  root.addEventListener('mouseover', e => enter(at(e)));
  root.addEventListener('mouseleave', leave);
  root.addEventListener('focusin', e => at(e) && enter(at(e)));
  root.addEventListener('focusout', leave);
  root.addEventListener('click', e => { const m = at(e); if (m) { focus(m); choose(m); } });
  root.addEventListener('keydown', e => {
    const m = at(e);
    if (!m) return;
    if (e.key === 'Enter' || e.key === ' ') { e.preventDefault(); e.stopPropagation(); choose(m); }
    else if (/^(Arrow|Home|End)/.test(e.key)) {
      e.preventDefault(); e.stopPropagation(); const next = walk(m, e.key); if (next) focus(next);
    } else if (e.key === 'Escape') leave();
  });
  let timer = 0;
  function draw() {
    clearInterval(timer); timer = 0;
    root.innerHTML = model.get('value'); root.hidden = !root.innerHTML;
    root.append(tip); tip.hidden = true;
    const first = root.querySelector('[data-key], [data-words]');
    if (first) first.tabIndex = 0;
    const slider = root.querySelector('.mixsd-time input'), play = root.querySelector('.mixsd-time button');
    if (slider) {
      const show = () => {
        const k = +slider.value, words = JSON.parse(slider.dataset.steps);
        root.querySelector('.mixsd-time output').textContent = words[k];
        slider.setAttribute('aria-valuetext', words[k]);
        for (const m of root.querySelectorAll('[data-states]')) m.dataset.now = m.dataset.states[k];
        for (const m of root.querySelectorAll('[data-texts]')) m.textContent = JSON.parse(m.dataset.texts)[k];
      };
      slider.addEventListener('input', show);
      const stop = () => { clearInterval(timer); timer = 0; play.textContent = '▶ play'; };
      play.addEventListener('click', () => {
        if (timer) return stop();
        if (slider.value === slider.max) slider.value = 0;
        show(); play.textContent = '❚❚ pause';
        timer = setInterval(() => {
          if (!root.isConnected || slider.value === slider.max) return stop();
          slider.value = +slider.value + 1; show();
        }, 900);
      });
      show();
    }
  }
  model.on('change:value', draw); draw();
  return () => { clearInterval(timer); model.off('change:value', draw); };
}
export default {render};
