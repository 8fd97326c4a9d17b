() => {
  const { id, tagName, className, ariaLabel } = document.activeElement;
  return id || ariaLabel || `${tagName} ${className}`;
}
