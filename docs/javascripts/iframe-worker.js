// Lets the search work in a site that is opened from disk. There browsers start no workers, so the worker's script
// runs in a hidden frame. The theme's offline plugin would fetch such a script from a network.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super()
      this.frame = document.createElement("iframe")
      this.frame.hidden = true
      document.body.append(this.frame)
      const inner = this.frame.contentWindow
      inner.document.open()
      inner.document.write("<!doctype html><title>search</title><body>")
      inner.document.close()
      inner.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }))
      this.started = new Promise((resolve, reject) => {
        const script = inner.document.createElement("script")
        script.src = new URL(url, location)
        script.onload = resolve
        script.onerror = reject
        inner.document.body.append(script)
      })
    }

    postMessage(data) {
      const inner = this.frame.contentWindow
      this.started.then(() => inner.dispatchEvent(new inner.MessageEvent("message", { data })))
    }

    terminate() {
      this.frame.remove()
    }
  }
}
